// Short names for the schemas of `openapi.json` that pages use.
import type { components } from "./schema";

type Schemas = components["schemas"];

export type ApiKey = Schemas["ApiKey"];
export type Caller = Schemas["Caller"];
export type ChosenDeadLetters = Schemas["DeadLetterSelection"];
export type ConsumerStatus = Schemas["ConsumerStatus"];
export type ConsumerDeadLetter = Schemas["ConsumerDeadLetter"];
export type DeadLetter = Schemas["HubDeadLetter"];
export type EventType = Schemas["EventType"];
export type EventTypeWithVersions = Schemas["EventTypeWithVersions"];
export type Finding = Schemas["Finding"];
export type Gathering = Schemas["GatheringSummary"];
export type HubAttempt = Schemas["HubAttempt"];
export type HubEvent = Schemas["HubListedEvent"];
export type HubEventWithOutcomes = Schemas["HubEventWithOutcomes"];
export type HubMessage = Schemas["HubMessage"];
export type HubOutcome = Schemas["HubOutcome"];
export type LogMessage = Schemas["LogMessage"];
export type Mail = Schemas["Email"];
export type NewSubscriber = Schemas["NewSubscriber"];
export type Notification = Schemas["Notification"];
export type Overview = Schemas["Overview"];
export type ParkedMessage = Schemas["ParkedMessage"];
export type PortalToken = Schemas["PortalToken"];
export type Project = Schemas["Project"];
export type ProjectListItem = Schemas["ProjectListItem"];
export type Registration = Schemas["Registration"];
export type Replay = Schemas["HubReplay"];
export type Stream = Schemas["Stream"];
export type StreamWithState = Schemas["StreamWithState"];
export type Subscriber = Schemas["SubscriberWithSecrets"];
export type SubscriberHealth = Schemas["SubscriberHealth"];
export type Tenant = Schemas["TenantDetails"];
export type TestResult = Schemas["TestResult"];
