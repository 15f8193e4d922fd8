import pg from 'pg'
import { ORDER, serve, URL } from './forms.mjs'

const db = new pg.Client(URL)
await db.connect()

await serve('pg', async (sql, values, finish) => {
  await db.query('begin')
  try {
    await db.query(ORDER)
    const { rows } = await db.query(sql, values)
    const id = finish(rows[0].post)
    await db.query('commit')
    return id
  } catch (error) {
    await db.query('rollback')
    throw error
  }
})
await db.end()
