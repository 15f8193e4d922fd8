import type { HubAttempt } from "../api/types";
import { formatMilliseconds } from "../lib/format";
import { link } from "../lib/router";
import { Badge, StateBadge, Time, type Tone } from "./basics";

const TONES: Partial<Record<HubAttempt["outcome"], Tone>> = { delivered: "good", failed: "warn", dead: "bad" };

/**
 * The attempts of a message as entries of a timeline. Each time that the message was sent again begins with a separate entry.
 * `letter` is the dead letter that the page shows, which needs no link to itself.
 */
export function AttemptEntries({ attempts, letter }: { attempts: HubAttempt[]; letter?: string }) {
  return (
    <>
      {attempts.map((attempt, index) => (
        <>
          {isNewSending(attempt, attempts[index - 1]) && <SendingEntry attempt={attempt} letter={letter} />}
          <li key={`${attempt.attempt} ${attempt.at}`} class={TONES[attempt.outcome]}>
            <div class="row">
              <strong>Attempt {attempt.attempt}</strong>
              <StateBadge state={attempt.outcome} />
              <span>{attempt.status ? `Status ${attempt.status}` : attempt.error}</span>
              <span class="muted">{attempt.latency_ms === 0 ? "under 1 ms" : formatMilliseconds(attempt.latency_ms)}</span>
            </div>
            <div class="timeline-time"><Time at={attempt.at} /></div>
            {attempt.detail && <div>{attempt.detail}</div>}
            {attempt.excerpt && <code class="muted">{attempt.excerpt}</code>}
          </li>
        </>
      ))}
    </>
  );
}

function isNewSending(attempt: HubAttempt, previous: HubAttempt | undefined): boolean {
  if (attempt.kind === "original") return false;
  return attempt.retry_of !== previous?.retry_of || attempt.replay_id !== previous?.replay_id;
}

function SendingEntry({ attempt, letter }: { attempt: HubAttempt; letter?: string }) {
  return (
    <li class="info">
      {attempt.kind === "retry"
        ? <><strong>Retried</strong>: {attempt.retry_of && attempt.retry_of !== letter ? <a href={link("dead-letters", attempt.retry_of)}>its dead letter</a> : attempt.retry_of ? "this dead letter" : "its dead letter"} was sent again</>
        : <><strong>Sent again</strong> by {attempt.replay_id ? <a href={link("replays", attempt.replay_id)}>a replay</a> : "a replay"}; attempts are counted from 1</>}
    </li>
  );
}

/** Marks a message that was sent again. */
export function KindBadge({ kind }: { kind: HubAttempt["kind"] }) {
  return kind === "original" ? null : <Badge plain>{kind === "retry" ? "retried" : "replayed"}</Badge>;
}
