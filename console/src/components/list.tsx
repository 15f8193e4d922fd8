// A list of the API, page by page. Only the shown page is in memory, and only the first one is refreshed.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { useLive, type Live } from "../lib/live";
import { Loaded } from "./async";
import { Table, type Column } from "./table";

export const PAGE_SIZE = 25;

interface Listed<T> {
  items: T[];
  next_cursor?: string | null;
}

export interface PagedList<T> extends Live<Listed<T>> {
  number: number;
  goBack?: () => void;
  goOn?: () => void;
}

/** Loads the pages of a list. `key` contains the filters: when it changes, the list starts at its first page. */
export function usePages<T>(
  key: string,
  load: (page: { limit: number; cursor?: string }, signal: AbortSignal) => Promise<Listed<T>>,
  everyMs = 0,
): PagedList<T> {
  const [position, setPosition] = useState<{ key: string; cursors: string[] }>({ key, cursors: [] });
  const cursors = position.key === key ? position.cursors : [];
  const cursor = cursors[cursors.length - 1];
  const live = useLive(
    `${key} ${cursor ?? ""}`,
    (signal) => load({ limit: PAGE_SIZE, cursor }, signal),
    cursor === undefined ? everyMs : 0,
  );
  const next = live.data?.next_cursor;
  return {
    ...live,
    number: cursors.length + 1,
    goBack: cursors.length > 0 ? () => setPosition({ key, cursors: cursors.slice(0, -1) }) : undefined,
    goOn: next ? () => setPosition({ key, cursors: [...cursors, next] }) : undefined,
  };
}

interface ListViewProps<T> {
  list: PagedList<T>;
  label: string;
  columns: Column<T>[];
  rowKey: (row: T) => string;
  empty: ComponentChildren;
}

export function ListView<T>({ list, label, columns, rowKey, empty }: ListViewProps<T>) {
  return (
    <Loaded live={list}>
      {(page) => page.items.length === 0 && list.number === 1 ? empty : (
        <>
          <Table label={label} columns={columns} rows={page.items} rowKey={rowKey} />
          {(list.goBack ?? list.goOn) && (
            <div class="table-foot">
              <span>Page {list.number}{list.number > 1 && ": not refreshed"}</span>
              <span class="row">
                <button type="button" class="button small" disabled={!list.goBack} onClick={list.goBack}>Previous</button>
                <button type="button" class="button small" disabled={!list.goOn} onClick={list.goOn}>Next</button>
              </span>
            </div>
          )}
        </>
      )}
    </Loaded>
  );
}
