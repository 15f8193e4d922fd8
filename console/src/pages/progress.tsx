import { useEffect, useState } from "preact/hooks";
import { ApiError, api } from "../api/client";
import { readStream } from "../api/stream";
import type { Project, ProjectListItem } from "../api/types";
import { Empty, ErrorBox, Skeleton } from "../components/async";
import { Card, Details, Meter, Notice, Page, Stat, StateBadge, Time } from "../components/basics";
import { TimeChart } from "../components/chart";
import { ListView, usePages } from "../components/list";
import { formatNumber, formatPercent, formatRate, formatSeconds } from "../lib/format";
import { toApiError } from "../lib/live";
import { link } from "../lib/router";
import type { PageProps } from "../pages";

const POLL_MS = 2_000;
const SAMPLES_MAX = 300;
const RECONNECT_MS = 3_000;

export function ProgressPage({ parts }: PageProps) {
  const [id] = parts;
  return id === undefined ? <ProjectList /> : <ProjectPage id={id} />;
}

function ProjectList() {
  const list = usePages<ProjectListItem>("projects", (page, signal) => api.get("/progress/v1/projects", { query: page, signal }), POLL_MS);
  return (
    <Page title="Progress" description="Projects with many items, and how far they are.">
      <Card flush>
        <ListView list={list} label="Projects" rowKey={(row) => row.id} columns={[
          { header: "Project", primary: true, cell: (row) => <a href={link("progress", row.id)}>{row.id}</a> },
          { header: "Status", cell: (row) => row.status ? <StateBadge state={row.status} /> : <span class="muted">unknown</span> },
          { header: "Progress", cell: (row) => <ProjectMeter project={row} /> },
          { header: "Done", align: "right", cell: (row) => `${formatNumber(row.done ?? 0)} of ${formatNumber(row.total ?? 0)}` },
          { header: "Errors", align: "right", cell: (row) => <span class={row.errors ? "text-bad" : ""}>{formatNumber(row.errors ?? 0)}</span> },
          { header: "Created", cell: (row) => <Time at={row.created_at} /> },
        ]} empty={<Empty title="No project">Create one with <code>POST /progress/v1/projects</code>, then mark its items as they are done.</Empty>} />
      </Card>
    </Page>
  );
}

function ProjectMeter({ project }: { project: ProjectListItem | Project }) {
  const share = project.total ? (project.done ?? 0) / project.total : 0;
  const tone = project.status === "FAILED" ? "bad" : project.status === "DONE" ? "good" : "neutral";
  return <Meter share={share} label={`${formatPercent(share)} done`} tone={tone} />;
}

interface Sample {
  time: number;
  rate: number | null;
}

function ProjectPage({ id }: { id: string }) {
  const { project, error, samples, isLost } = useProjectStream(id);
  return (
    <Page title={id} parent={{ label: "Progress", href: link("progress") }} description={project && <StateBadge state={project.status} />}>
      {error && <ErrorBox error={error} />}
      {isLost && <Notice tone="bad">The counts of this project were lost. It can be started again.</Notice>}
      {project === undefined ? !error && <Skeleton /> : <ProjectView project={project} samples={samples} />}
    </Page>
  );
}

function isOver(project: Project): boolean {
  return project.status === "DONE" || project.status === "FAILED";
}

function ProjectView({ project, samples }: { project: Project; samples: Sample[] }) {
  const share = project.total === 0 ? 0 : project.done / project.total;
  return (
    <>
      <Card title={`${formatNumber(project.done)} of ${formatNumber(project.total)} items`} actions={<strong>{formatPercent(share)}</strong>}><ProjectMeter project={project} /></Card>
      <div class="stats">
        {isOver(project) ? <FinishedStats project={project} /> : <RunningStats project={project} />}
        <Stat label="Errors" value={formatNumber(project.errors)} tone={project.errors > 0 ? "bad" : "neutral"} />
        <Stat label="Left" value={formatNumber(Math.max(0, project.total - project.done))} />
      </div>
      {!isOver(project) && (
        <Card title="Items per second since you opened this page">
          <TimeChart label="Items per second" times={samples.map((sample) => sample.time)} format={formatRate}
            series={[{ label: "Rate", colour: "blue", values: samples.map((sample) => sample.rate) }]} />
        </Card>
      )}
      <Card title="Project">
        <Details entries={[["Created", <Time at={project.created_at} />], ["Finished", <Time at={project.finished_at} />], ["Expires", <Time at={project.expires_at} />]]} />
      </Card>
    </>
  );
}

function RunningStats({ project }: { project: Project }) {
  return (
    <>
      <Stat label="Rate" value={project.rate === undefined || project.rate === null ? "–" : formatRate(project.rate)} />
      <Stat label="Estimated end" value={project.eta ? <Time at={project.eta} /> : "–"} />
    </>
  );
}

function FinishedStats({ project }: { project: Project }) {
  if (!project.finished_at) return null;
  const seconds = (Date.parse(project.finished_at) - Date.parse(project.created_at)) / 1000;
  return (
    <>
      <Stat label="Duration" value={formatSeconds(seconds)} />
      <Stat label="Average rate" value={seconds > 0 ? formatRate(project.done / seconds) : "–"} />
    </>
  );
}

interface Followed {
  project?: Project;
  error?: ApiError;
  isLost: boolean;
  samples: Sample[];
}

/** Follows the project by its server-sent events, and connects again when the stream is cut off. */
function useProjectStream(id: string): Followed {
  const [state, setState] = useState<Followed>({ isLost: false, samples: [] });
  useEffect(() => {
    const controller = new AbortController();
    let timer = 0;
    let hasEnded = false;
    const onProgress = (project: Project) => {
      hasEnded = isOver(project);
      const sample = { time: Date.now() / 1000, rate: project.rate ?? null };
      setState((previous) => ({ project, isLost: false, samples: [...previous.samples.slice(1 - SAMPLES_MAX), sample] }));
    };
    const follow = async () => {
      try {
        await readStream(`/progress/v1/projects/${encodeURIComponent(id)}/events`, controller.signal, (event) => {
          if (event.name === "progress") onProgress(JSON.parse(event.data) as Project);
          else if (event.name === "progress-lost") setState((previous) => ({ ...previous, isLost: true }));
        });
      } catch (cause) {
        if (controller.signal.aborted) return;
        setState((previous) => ({ ...previous, error: toApiError(cause) }));
      }
      if (!hasEnded && !controller.signal.aborted) timer = window.setTimeout(follow, RECONNECT_MS);
    };
    void follow();
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, [id]);
  return state;
}
