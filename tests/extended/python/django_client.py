from urllib.parse import urlsplit

import django
from django.conf import settings
from django.db import connection, transaction
from psycopg.types.json import Json, Jsonb

import forms

url = urlsplit(forms.URL)
address = {"HOST": url.hostname, "PORT": url.port, "NAME": url.path[1:], "USER": url.username, "PASSWORD": url.password}
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **address}})
django.setup()


def post(sql, values, finish):
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(forms.ORDER)
        cursor.execute(forms.with_markers(sql, "%s"), values)
        return finish(cursor.fetchone()[0])


forms.serve(django.__version__, post, {"json": Json, "jsonb": Jsonb})
