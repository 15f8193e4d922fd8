// What the JavaScript clients share: it runs the statements that the test writes to standard input.
//
// Each line is a transaction: `commit` or `rollback`, a statement, and its values as `KIND VALUE`, separated by tabs. The answer is
// one line: the id of the message, `error: ...`, or `unsupported` if the client has no such kind of value.
import { readFileSync } from 'node:fs'
import { createInterface } from 'node:readline'

export const URL = process.env.DATABASE_URL
// The change that the message reports.
export const ORDER = 'insert into orders default values'

// A UUID is a string in JavaScript.
const KINDS = { text: String, integer: Number, object: JSON.parse, null: () => null }

class RolledBack extends Error {}

// Calls `post(sql, values, finish)` for each line. It has to return `finish(id)` inside its transaction.
export async function serve(client, post, kinds = {}) {
  console.log(JSON.parse(readFileSync(`node_modules/${client}/package.json`)).version)
  for await (const line of createInterface({ input: process.stdin })) {
    console.log(await answer(line.split('\t'), post, { ...KINDS, ...kinds }))
  }
}

async function answer([end, sql, ...fields], post, kinds) {
  const values = fields.map((field) => field.split(/ (.*)/, 2))
  if (!values.every(([kind]) => kind in kinds)) return 'unsupported'
  let posted
  const finish = (id) => {
    posted = id
    if (end === 'rollback') throw new RolledBack()
    return id
  }
  try {
    return await post(sql, values.map(([kind, value]) => kinds[kind](value)), finish)
  } catch (error) {
    return error instanceof RolledBack ? posted : `error: ${error.cause?.message ?? error.message}`.replaceAll(/\s+/g, ' ')
  }
}

// The statement as the parts of a template literal.
export function template(sql) {
  const parts = sql.split(/\$\d+/)
  return Object.assign(parts, { raw: parts })
}
