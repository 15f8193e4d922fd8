import { useRef, useState } from "preact/hooks";
import { api } from "../api/client";
import type { Mail, Notification } from "../api/types";
import { Empty } from "../components/async";
import { Card, CodeBlock, Details, Identifier, Page, StateBadge, Tabs, Time } from "../components/basics";
import { BulkAction } from "../components/bulk";
import { Dialog } from "../components/dialog";
import { ActionButton, SelectField, TextField } from "../components/form";
import { givenUpRange } from "../components/given-up";
import { ListView, usePages } from "../components/list";
import { showToast } from "../components/toasts";
import { atLeast } from "../lib/format";
import { link, setQuery } from "../lib/router";
import type { PageProps } from "../pages";

/** How many notifications a question counts. */
const COUNTED_MAX = 100;
const POLL_MS = 3_000;
const CHANNELS: Notification["channel"][] = ["email", "in_app", "webhook"];
const NOTIFICATION_STATUSES: Notification["status"][] = ["waiting", "delivered", "dead", "skipped"];
const MAIL_STATUSES: Mail["status"][] = ["queued", "sent", "captured", "dead", "expired", "shadowed"];

export function NotificationsPage({ parts, query }: PageProps) {
  const [tab = ""] = parts;
  return (
    <Page title="Notifications and mail" description="The messages that users get. Without a mail server, e-mails are captured and shown here.">
      <Tabs label="Parts" current={tab} tabs={[
        { id: "", label: "Notifications", href: link("notifications") },
        { id: "mail", label: "Mail", href: link("notifications", "mail") },
        { id: "announcements", label: "Announcements", href: link("notifications", "announcements") },
      ]} />
      {tab === "mail" ? <Mails query={query} /> : tab === "announcements" ? <Announcements /> : <Notifications query={query} />}
    </Page>
  );
}

function statusOptions(names: string[]): { value: string; label: string }[] {
  return [{ value: "", label: "All" }, ...names.map((name) => ({ value: name, label: name }))];
}

interface Selection {
  channel?: Notification["channel"];
  event_type?: string;
}

function Notifications({ query }: { query: URLSearchParams }) {
  const status = NOTIFICATION_STATUSES.find((name) => name === query.get("status"));
  const channel = CHANNELS.find((name) => name === query.get("channel"));
  const eventType = query.get("event_type") ?? "";
  const select = (): Selection => ({ channel, event_type: eventType || undefined });
  const list = usePages<Notification>(`notifications ${status} ${channel} ${eventType}`, (page, signal) =>
    api.get("/admin/v1/notifications", { query: { status, ...select(), ...page }, signal }), POLL_MS);
  // As it was when the question was asked.
  const asked = useRef<Selection>({});
  const retry = (id: number) => async () => {
    await api.post("/admin/v1/notifications/{id}/retry", { path: { id } });
    showToast("The notification is delivered again.");
    list.reload();
  };
  return (
    <>
      <div class="row spread">
        <div class="filters">
          <SelectField label="Status" value={status ?? ""} onChange={(value) => setQuery({ status: value })} options={statusOptions(NOTIFICATION_STATUSES)} />
          <SelectField label="Channel" value={channel ?? ""} onChange={(value) => setQuery({ channel: value })}
            options={[{ value: "", label: "All" }, ...CHANNELS.map((value) => ({ value, label: channelName(value) }))]} />
          <TextField label="Event type" value={eventType} onChange={(value) => setQuery({ event_type: value })} placeholder="order.paid" />
        </div>
        {status === "dead" && <BulkAction label="Retry all that match" doing="Retrying" done="retried" onDone={list.reload}
          step={({ to, scope, signal }) => api.post("/admin/v1/notifications/retry", { body: { ...asked.current, to }, scope, signal })}
          question={async (_, signal) => {
            asked.current = select();
            const { items, next_cursor } = await api.get("/admin/v1/notifications", { query: { status: "dead", ...asked.current, limit: COUNTED_MAX }, signal });
            const hasMore = Boolean(next_cursor);
            return {
              title: `Retry ${atLeast(items.length, hasMore, "dead notification")}?`,
              body: <SelectionDetails selection={asked.current} notifications={items} hasMore={hasMore} />,
              confirm: "Retry all",
            };
          }} />}
      </div>
      <Card flush>
        <ListView list={list} label="Notifications" rowKey={(row) => String(row.id)} columns={[
          { header: "Event type", primary: true, cell: (row) => row.event_type ? <code>{row.event_type}</code> : "unknown" },
          { header: "Channel", cell: (row) => channelName(row.channel) },
          { header: "Status", cell: (row) => <StateBadge state={row.status} title={row.last_error ?? undefined} /> },
          { header: "User", cell: (row) => <Identifier value={row.user_id} /> },
          { header: "Failed attempts", align: "right", cell: (row) => row.attempts },
          { header: "Created", cell: (row) => <Time at={row.created_at} /> },
          { header: "Actions", actions: true, cell: (row) => row.status === "dead" ? <ActionButton class="small" label="Retry" onRun={retry(row.id)} /> : null },
        ]} empty={<Empty title="No notification">Business events become notifications for their recipients.</Empty>} />
      </Card>
    </>
  );
}

function channelName(channel: Notification["channel"]): string {
  return channel === "email" ? "e-mail" : channel.replace("_", "-");
}

interface SelectionDetailsProps {
  selection: Selection;
  /** The newest of them. */
  notifications: Notification[];
  hasMore: boolean;
}

/** Which dead notifications a question is about. */
function SelectionDetails({ selection, notifications, hasMore }: SelectionDetailsProps) {
  return (
    <div class="stack">
      <p>Each is delivered again.</p>
      <Details entries={[
        ["Channel", selection.channel ? channelName(selection.channel) : "all"],
        ["Event type", selection.event_type ?? "all"],
        ["Created", givenUpRange(notifications.map((notification) => notification.created_at), hasMore)],
      ]} />
    </div>
  );
}

function Mails({ query }: { query: URLSearchParams }) {
  const status = MAIL_STATUSES.find((name) => name === query.get("status"));
  const to = query.get("to") ?? "";
  const [opened, setOpened] = useState<Mail>();
  const list = usePages<Mail>(`mail ${status} ${to}`, (page, signal) => api.get("/admin/v1/mail", { query: { status, to: to || undefined, ...page }, signal }), POLL_MS);
  const retry = (id: number) => async () => {
    await api.post("/admin/v1/mail/{id}/retry", { path: { id } });
    showToast("The e-mail is sent again.");
    list.reload();
  };
  return (
    <>
      <div class="filters">
        <SelectField label="Status" value={status ?? ""} onChange={(value) => setQuery({ status: value })} options={statusOptions(MAIL_STATUSES)} />
        <TextField label="Recipient" value={to} onChange={(value) => setQuery({ to: value })} placeholder="ada@example.org" />
      </div>
      <Card flush>
        <ListView list={list} label="Mail" rowKey={(row) => String(row.id)} columns={[
          { header: "Subject", primary: true, cell: (row) => <button type="button" class="link-button" onClick={() => setOpened(row)}>{row.subject || "(no subject)"}</button> },
          { header: "To", cell: (row) => <span class="truncate">{row.to}</span> },
          { header: "Template", cell: (row) => <code class="truncate" title={row.template}>{row.template}</code> },
          { header: "Status", cell: (row) => <StateBadge state={row.status} title={row.last_error ?? undefined} /> },
          { header: "Created", cell: (row) => <Time at={row.created_at} /> },
          { header: "Actions", actions: true, cell: (row) => row.status === "dead" ? <ActionButton class="small" label="Retry" onRun={retry(row.id)} /> : null },
        ]} empty={<Empty title="No e-mail">Register a user, and the verification e-mail appears here.</Empty>} />
      </Card>
      {opened && <MailDialog mail={opened} onClose={() => setOpened(undefined)} />}
    </>
  );
}

function MailDialog({ mail, onClose }: { mail: Mail; onClose: () => void }) {
  return (
    <Dialog title={mail.subject} onClose={onClose}>
      <h2 class="dialog-head">{mail.subject}</h2>
      <div class="dialog-body stack">
        <Details entries={[
          ["To", mail.to], ["Status", <StateBadge state={mail.status} />], ["Template", <code>{mail.template}</code>], ["Locale", mail.locale],
          ["Attempts", mail.attempts], ["Last error", mail.last_error], ["Answer of the server", mail.smtp_reply], ["Sent", <Time at={mail.sent_at} />],
        ]} />
        {mail.text ? <CodeBlock label="text of the e-mail" value={mail.text} /> : <p class="muted">The content is shown for captured e-mails only.</p>}
      </div>
      <div class="dialog-foot"><button type="button" class="button" onClick={onClose}>Close</button></div>
    </Dialog>
  );
}

function Announcements() {
  const list = usePages("announcements", (page, signal) => api.get("/admin/v1/announcements", { query: page, signal }), POLL_MS);
  const retry = (id: number) => async () => {
    await api.post("/admin/v1/announcements/{id}/retry", { path: { id } });
    list.reload();
  };
  return (
    <Card flush>
      <ListView list={list} label="Announcements" rowKey={(row) => String(row.id)} columns={[
        { header: "Subject", primary: true, cell: (row) => row.subject },
        { header: "Failed attempts", align: "right", cell: (row) => row.attempts },
        { header: "Next step", cell: (row) => <Time at={row.due_at} /> },
        { header: "Last error", cell: (row) => row.last_error ?? <span class="muted">–</span> },
        { header: "Actions", actions: true, cell: (row) => row.due_at ? null : <ActionButton class="small" label="Retry" onRun={retry(row.id)} /> },
      ]} empty={<Empty title="No announcement is running">An announcement to many people is sent in steps. Those that are running appear here.</Empty>} />
    </Card>
  );
}
