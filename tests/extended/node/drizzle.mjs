import { sql as query } from 'drizzle-orm'
import { ORDER, serve, template, URL } from './forms.mjs'

const driver = process.argv[2]
const { drizzle } = await import(`drizzle-orm/${driver}`)
const db = drizzle(URL)

await serve('drizzle-orm', (sql, values, finish) =>
  db.transaction(async (transaction) => {
    await transaction.execute(ORDER)
    const result = await transaction.execute(query(template(sql), ...values))
    return finish((result.rows ?? result)[0].post)
  }),
)
await db.$client.end()
