import asyncio
import sys

import sqlalchemy
from sqlalchemy import bindparam, create_engine, text
from sqlalchemy.dialects.postgresql import JSON, JSONB
from sqlalchemy.ext.asyncio import create_async_engine

import forms

driver = sys.argv[1]
url = sqlalchemy.make_url(forms.URL).set(drivername=f"postgresql+{driver}")


class Typed:
    """A value whose type the statement declares."""

    def __init__(self, value, type_):
        self.value, self.type = value, type_


def post_with(db, sql, values, finish):
    statement = text(forms.with_markers(sql, r":p\1"))
    parameters = {f"p{number}": value for number, value in enumerate(values, 1)}
    for name, value in parameters.items():
        if isinstance(value, Typed):
            statement = statement.bindparams(bindparam(name, type_=value.type))
            parameters[name] = value.value
    with db.begin():
        db.execute(text(forms.ORDER))
        return finish(db.execute(statement, parameters).scalar_one())


if driver == "asyncpg":
    engine = create_async_engine(url)
    runner = asyncio.Runner()

    async def post_async(*arguments):
        async with engine.connect() as db:
            return await db.run_sync(post_with, *arguments)

    def post(*arguments):
        return runner.run(post_async(*arguments))

else:
    engine = create_engine(url)

    def post(*arguments):
        with engine.connect() as db:
            return post_with(db, *arguments)


json_types = {"json": lambda value: Typed(value, JSON), "jsonb": lambda value: Typed(value, JSONB)}
forms.serve(sqlalchemy.__version__, post, json_types)
