import psycopg
from psycopg.types.json import Json, Jsonb

import forms

db = psycopg.connect(forms.URL, autocommit=True)


def post(sql, values, finish):
    with db.transaction():
        db.execute(forms.ORDER)
        return finish(db.execute(forms.with_markers(sql, "%s"), values).fetchone()[0])


forms.serve(psycopg.__version__, post, {"json": Json, "jsonb": Jsonb})
