from importlib.metadata import version
from urllib.parse import urlsplit

import pg8000.dbapi

import forms

url = urlsplit(forms.URL)
db = pg8000.dbapi.connect(url.username, url.hostname, url.path[1:], url.port, url.password)


def post(sql, values, finish):
    cursor = db.cursor()
    try:
        cursor.execute(forms.ORDER)
        cursor.execute(forms.with_markers(sql, "%s"), values)
        message_id = finish(cursor.fetchone()[0])
        db.commit()
        return message_id
    except BaseException:
        db.rollback()
        raise


forms.serve(version("pg8000"), post)
