import postgres from 'postgres'
import { ORDER, serve, template, URL } from './forms.mjs'

const db = postgres(URL)
const jsonb = (text) => db.json(JSON.parse(text))

await serve(
  'postgres',
  (sql, values, finish) =>
    db.begin(async (transaction) => {
      await transaction.unsafe(ORDER)
      const [row] = await transaction(template(sql), ...values)
      return finish(row.post)
    }),
  { jsonb },
)
await db.end()
