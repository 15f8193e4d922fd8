import { useState } from "preact/hooks";
import { api } from "../api/client";
import type { Mail, Notification } from "../api/types";
import { Empty } from "../components/async";
import { Card, CodeBlock, Details, Identifier, Page, StateBadge, Tabs, Time } from "../components/basics";
import { BulkAction } from "../components/bulk";
import { Dialog } from "../components/dialog";
import { ActionButton, SelectField, TextField } from "../components/form";
import { ListView, usePages } from "../components/list";
import { showToast } from "../components/toasts";
import { link, setQuery } from "../lib/router";
import type { PageProps } from "../pages";

const POLL_MS = 3_000;
const NOTIFICATION_STATUSES: Notification["status"][] = ["waiting", "delivered", "dead", "skipped"];
const MAIL_STATUSES: Mail["status"][] = ["queued", "sent", "captured", "dead", "expired", "shadowed"];

export function NotificationsPage({ parts, query }: PageProps) {
  const [tab = ""] = parts;
  return (
    <Page title="Notifications and mail" description="What people get. Without a mail server, e-mails are captured and shown here.">
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

function Notifications({ query }: { query: URLSearchParams }) {
  const status = NOTIFICATION_STATUSES.find((name) => name === query.get("status"));
  const list = usePages<Notification>(`notifications ${status}`, (page, signal) => api.get("/admin/v1/notifications", { query: { status, ...page }, signal }), POLL_MS);
  const retry = (id: number) => async () => {
    await api.post("/admin/v1/notifications/{id}/retry", { path: { id } });
    showToast("The notification is delivered again.");
    list.reload();
  };
  return (
    <>
      <div class="row spread">
        <div class="filters"><SelectField label="Status" value={status ?? ""} onChange={(value) => setQuery({ status: value })} options={statusOptions(NOTIFICATION_STATUSES)} /></div>
        {status === "dead" && <BulkAction label="Retry all" doing="Retrying" done="retried" onDone={list.reload} step={() => api.post("/admin/v1/notifications/retry", { body: { all: true } })}
          question={{ title: "Retry all dead notifications?", body: "Each is delivered again.", confirm: "Retry all" }} />}
      </div>
      <Card flush>
        <ListView list={list} label="Notifications" rowKey={(row) => String(row.id)} columns={[
          { header: "Event type", primary: true, cell: (row) => row.event_type ? <code>{row.event_type}</code> : "unknown" },
          { header: "Channel", cell: (row) => row.channel === "email" ? "e-mail" : row.channel.replace("_", "-") },
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
