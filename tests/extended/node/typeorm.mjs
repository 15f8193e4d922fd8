import { DataSource } from 'typeorm'
import { ORDER, serve, URL } from './forms.mjs'

const db = new DataSource({ type: 'postgres', url: URL })
await db.initialize()

await serve('typeorm', (sql, values, finish) =>
  db.transaction(async (manager) => {
    await manager.query(ORDER)
    const rows = await manager.query(sql, values)
    return finish(rows[0].post)
  }),
)
await db.destroy()
