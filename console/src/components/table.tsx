import type { ComponentChildren } from "preact";

export interface Column<T> {
  header: string;
  cell: (row: T) => ComponentChildren;
  align?: "right";
  /** The column that names the row: the title of its card on a narrow screen. */
  primary?: boolean;
  /** A column of buttons, without a visible heading. */
  actions?: boolean;
  /** Left out of a compact table on a narrow screen. */
  optional?: boolean;
}

interface TableProps<T> {
  label: string;
  columns: Column<T>[];
  rows: T[];
  rowKey: (row: T) => string;
  /** Stays a table on narrow screens, with fewer columns. */
  compact?: boolean;
}

/** A table that becomes a list of cards on narrow screens, unless it is compact. The roles keep its meaning there. */
export function Table<T>({ label, columns, rows, rowKey, compact = false }: TableProps<T>) {
  return (
    <table class={`table ${compact ? "compact" : "cards"}`} role="table" aria-label={label}>
      <thead role="rowgroup">
        <tr role="row">
          {columns.map((column) => (
            <th key={column.header} role="columnheader" scope="col" class={cellClass(column)}>
              {column.actions ? <span class="visually-hidden">{column.header}</span> : column.header}
            </th>
          ))}
        </tr>
      </thead>
      <tbody role="rowgroup">
        {rows.map((row) => (
          <tr key={rowKey(row)} role="row">
            {columns.map((column) => (
              <td key={column.header} role="cell" data-label={column.header} class={cellClass(column)}>
                {column.actions ? <div class="cell-actions">{column.cell(row)}</div> : column.cell(row)}
              </td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function cellClass<T>(column: Column<T>): string {
  return [column.align === "right" && "align-right", column.primary && "primary", column.actions && "actions", column.optional && "optional"]
    .filter(Boolean).join(" ");
}
