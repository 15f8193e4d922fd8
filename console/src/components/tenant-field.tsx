import { api } from "../api/client";
import { OPTIONS_MAX, SearchSelect, type Found } from "./search-select";

export async function loadTenants(q: string, signal: AbortSignal): Promise<Found> {
  const page = await api.get("/admin/v1/tenants", { query: { q: q || undefined, limit: OPTIONS_MAX }, signal });
  return { options: page.items.map(({ name }) => ({ value: name, label: name })), hasMore: Boolean(page.next_cursor) };
}

interface TenantFieldProps {
  value: string;
  onChange: (name: string) => void;
  error?: string;
}

/** The choice of a tenant, for operators. */
export function TenantField({ value, onChange, error }: TenantFieldProps) {
  return <SearchSelect label="Tenant" name="tenants" load={loadTenants} value={value} onChange={onChange} error={error} />;
}
