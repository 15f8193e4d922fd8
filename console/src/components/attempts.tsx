import type { HubAttempt } from "../api/types";
import { formatMilliseconds } from "../lib/format";
import { StateBadge, Time, type Tone } from "./basics";

const TONES: Partial<Record<HubAttempt["outcome"], Tone>> = { delivered: "good", failed: "warn", dead: "bad" };

/** The attempts of a message as entries of a timeline. */
export function AttemptEntries({ attempts }: { attempts: HubAttempt[] }) {
  return (
    <>
      {attempts.map((attempt) => (
        <li key={`${attempt.attempt} ${attempt.at}`} class={TONES[attempt.outcome]}>
          <div class="row">
            <strong>Attempt {attempt.attempt}</strong>
            <StateBadge state={attempt.outcome} />
            <span>{attempt.status ? `Status ${attempt.status}` : attempt.error}</span>
            <span class="muted">{formatMilliseconds(attempt.latency_ms)}</span>
          </div>
          <div class="timeline-time"><Time at={attempt.at} /></div>
          {attempt.detail && <div>{attempt.detail}</div>}
          {attempt.excerpt && <code class="muted">{attempt.excerpt}</code>}
        </li>
      ))}
    </>
  );
}
