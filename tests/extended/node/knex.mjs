import knex from 'knex'
import { ORDER, serve, URL } from './forms.mjs'

const db = knex({ client: 'pg', connection: URL })

await serve('knex', (sql, values, finish) =>
  db.transaction(async (transaction) => {
    await transaction.raw(ORDER)
    const { rows } = await transaction.raw(sql.replaceAll(/\$\d+/g, '?'), values)
    return finish(rows[0].post)
  }),
)
await db.destroy()
