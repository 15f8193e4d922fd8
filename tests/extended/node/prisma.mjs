import { execFileSync } from 'node:child_process'
import { PrismaPg } from '@prisma/adapter-pg'
import { ORDER, serve, template, URL } from './forms.mjs'

// The generator downloads an engine that it does not use, unless it is told that there is one.
const environment = { ...process.env, PRISMA_SCHEMA_ENGINE_BINARY: process.execPath, PRISMA_HIDE_UPDATE_MESSAGE: '1' }
execFileSync('node_modules/.bin/prisma', ['generate', '--schema', 'schema.prisma'], { env: environment, stdio: 'pipe' })
const { PrismaClient } = await import('./generated/index.js')

const db = new PrismaClient({ adapter: new PrismaPg({ connectionString: URL }) })

await serve('prisma', (sql, values, finish) =>
  db.$transaction(async (transaction) => {
    await transaction.$executeRawUnsafe(ORDER)
    const rows = await transaction.$queryRaw(template(sql), ...values)
    return finish(rows[0].post)
  }),
)
await db.$disconnect()
