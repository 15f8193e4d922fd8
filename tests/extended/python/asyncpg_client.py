import asyncio

import asyncpg

import forms

runner = asyncio.Runner()
db = runner.run(asyncpg.connect(forms.URL))


async def post(sql, values, finish):
    async with db.transaction():
        await db.execute(forms.ORDER)
        return finish(await db.fetchval(sql, *values))


forms.serve(asyncpg.__version__, lambda *arguments: runner.run(post(*arguments)))
