import { actingTenant, caller } from "../api/session";
import { useStore } from "../lib/store";
import { OperatorOverview } from "./overview-operator";
import { TenantOverview } from "./overview-tenant";

/** Operators see the whole installation, unless they act for a tenant; all others see their tenant. */
export function OverviewPage() {
  const signedIn = useStore(caller);
  const tenant = useStore(actingTenant);
  return signedIn?.is_operator && tenant === "" ? <OperatorOverview /> : <TenantOverview />;
}
