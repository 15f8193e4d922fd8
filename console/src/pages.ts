// The pages, in the order of the navigation. To add one: write `pages/<name>.tsx` and add a line here.
import type { ComponentType } from "preact";
import type { Caller } from "./api/types";
import type { IconName } from "./components/icon";
import { DeadLettersPage } from "./pages/dead-letters";
import { DeliveriesPage } from "./pages/deliveries";
import { EventTypesPage } from "./pages/event-types";
import { EventsPage } from "./pages/events";
import { GatheringsPage } from "./pages/gatherings";
import { KeysPage } from "./pages/keys";
import { LogPage } from "./pages/log";
import { NotificationsPage } from "./pages/notifications";
import { OverviewPage } from "./pages/overview";
import { ProgressPage } from "./pages/progress";
import { ReplaysPage } from "./pages/replays";
import { StreamsPage } from "./pages/streams";
import { SubscribersPage } from "./pages/subscribers";
import { TenantsPage } from "./pages/tenants";

export interface PageProps {
  /** The parts of the address after the name of the page. */
  parts: string[];
  query: URLSearchParams;
}

export interface PageEntry {
  /** The first part of the address; empty for the overview. */
  path: string;
  label: string;
  group: string;
  icon: IconName;
  component: ComponentType<PageProps>;
  isFor: (caller: Caller) => boolean;
}

const anyone = () => true;
const operators = (caller: Caller) => caller.is_operator;
const keysAndUsers = (caller: Caller) => caller.kind !== "portal_token";

export const PAGES: PageEntry[] = [
  { path: "", label: "Overview", group: "", icon: "gauge", component: OverviewPage, isFor: anyone },
  { path: "events", label: "Events", group: "Webhooks", icon: "send", component: EventsPage, isFor: anyone },
  { path: "subscribers", label: "Subscribers", group: "Webhooks", icon: "plug", component: SubscribersPage, isFor: anyone },
  { path: "deliveries", label: "Deliveries", group: "Webhooks", icon: "list", component: DeliveriesPage, isFor: anyone },
  { path: "dead-letters", label: "Dead letters", group: "Webhooks", icon: "skull", component: DeadLettersPage, isFor: anyone },
  { path: "replays", label: "Replays", group: "Webhooks", icon: "replay", component: ReplaysPage, isFor: anyone },
  { path: "streams", label: "Streams", group: "Webhooks", icon: "stream", component: StreamsPage, isFor: anyone },
  { path: "event-types", label: "Event types", group: "Webhooks", icon: "tag", component: EventTypesPage, isFor: anyone },
  { path: "log", label: "Log and consumers", group: "Platform", icon: "layers", component: LogPage, isFor: operators },
  { path: "gatherings", label: "Gatherings", group: "Platform", icon: "people", component: GatheringsPage, isFor: operators },
  { path: "progress", label: "Progress", group: "Platform", icon: "progress", component: ProgressPage, isFor: keysAndUsers },
  { path: "notifications", label: "Notifications", group: "Platform", icon: "bell", component: NotificationsPage, isFor: operators },
  { path: "tenants", label: "Tenants", group: "Access", icon: "building", component: TenantsPage, isFor: operators },
  { path: "keys", label: "Keys", group: "Access", icon: "key", component: KeysPage, isFor: keysAndUsers },
];
