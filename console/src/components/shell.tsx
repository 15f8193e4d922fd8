// The frame around every page: navigation, tenant, theme, who is signed in.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { actingTenant, caller, signOut } from "../api/session";
import { brandName } from "../lib/brand";
import { link, switchTenant, useRoute } from "../lib/router";
import { useStore } from "../lib/store";
import { isDark, setTheme } from "../lib/theme";
import { PAGES } from "../pages";
import { Icon, Logo } from "./icon";
import { Palette } from "./palette";
import { useSearch } from "./search-select";
import { loadTenants } from "./tenant-field";

const isEmbedded = new URLSearchParams(location.search).get("embed") === "1";

export function Shell({ currentPath, children }: { currentPath: string; children: ComponentChildren }) {
  const [isMenuOpen, setMenuOpen] = useState(false);
  const [isPaletteOpen, setPaletteOpen] = useState(false);
  const route = useRoute();
  useEffect(() => setMenuOpen(false), [route]);
  usePaletteShortcut(() => setPaletteOpen(true));
  return (
    <div class={isEmbedded ? "shell embedded" : "shell"}>
      <a class="skip-link" href="#content" onClick={focusContent}>Skip to the content</a>
      {!isEmbedded && (
        <>
          {isMenuOpen && <button type="button" class="sidebar-backdrop" aria-label="Close the menu" onClick={() => setMenuOpen(false)} />}
          <Sidebar currentPath={currentPath} isOpen={isMenuOpen} />
        </>
      )}
      <div class="main">
        {isEmbedded ? <EmbeddedTabs currentPath={currentPath} /> : (
          <Topbar onMenu={() => setMenuOpen(!isMenuOpen)} isMenuOpen={isMenuOpen} onSearch={() => setPaletteOpen(true)} />
        )}
        <main id="content" class="content" tabIndex={-1}>{children}</main>
      </div>
      {isPaletteOpen && <Palette onClose={() => setPaletteOpen(false)} />}
    </div>
  );
}

function focusContent(event: MouseEvent): void {
  event.preventDefault();
  document.getElementById("content")?.focus();
}

function usePaletteShortcut(open: () => void): void {
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      const isTyping = event.target instanceof Element && event.target.closest("input, textarea, select, dialog") !== null;
      const isShortcut = (event.key === "k" && (event.ctrlKey || event.metaKey)) || (event.key === "/" && !isTyping);
      if (!isShortcut) return;
      event.preventDefault();
      open();
    };
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, []);
}

/** The pages that the caller may open, without those of other groups when the page is embedded. */
function useVisiblePages() {
  const signedIn = useStore(caller);
  return PAGES.filter((page) => signedIn !== null && page.isFor(signedIn));
}

function Sidebar({ currentPath, isOpen }: { currentPath: string; isOpen: boolean }) {
  const pages = useVisiblePages();
  const name = useStore(brandName);
  const groups = [...new Set(pages.map((page) => page.group))];
  return (
    <aside class={isOpen ? "sidebar open" : "sidebar"} id="navigation">
      <a class="brand" href={link()}><Logo /><span class="truncate">{name}</span></a>
      <nav aria-label="Pages">
        {groups.map((group) => (
          <div key={group}>
            {group !== "" && <div class="nav-title">{group}</div>}
            <ul class="nav-group">
              {pages.filter((page) => page.group === group).map((page) => (
                <li key={page.path}>
                  <a class="nav-link" href={link(page.path)} aria-current={page.path === currentPath ? "page" : undefined}>
                    <Icon name={page.icon} />{page.label}
                  </a>
                </li>
              ))}
            </ul>
          </div>
        ))}
      </nav>
      <SignedInAs />
    </aside>
  );
}

function SignedInAs() {
  const signedIn = useStore(caller);
  if (signedIn === null) return null;
  const kinds = { key: "API key", portal_token: "Portal token", user: "User" };
  return (
    <div class="sidebar-foot">
      <div>
        <div class="truncate" title={signedIn.name}>{signedIn.name || "Signed in"}</div>
        <div class="muted">{kinds[signedIn.kind]}{signedIn.read_only ? ", read only" : ""}</div>
      </div>
      <button type="button" class="button small" onClick={() => signOut()}>Sign out</button>
    </div>
  );
}

interface TopbarProps {
  onMenu: () => void;
  isMenuOpen: boolean;
  onSearch: () => void;
}

function Topbar({ onMenu, isMenuOpen, onSearch }: TopbarProps) {
  const dark = useStore(isDark);
  const themeLabel = dark ? "Use the light theme" : "Use the dark theme";
  return (
    <header class="topbar">
      <button type="button" class="button icon quiet menu-button" aria-label="Menu" aria-expanded={isMenuOpen} aria-controls="navigation" onClick={onMenu}>
        <Icon name="menu" />
      </button>
      <button type="button" class="search-button" aria-label="Go to a page or an id" onClick={onSearch}>
        <Icon name="search" size={14} /><span>Go to a page or an id</span><kbd>/</kbd>
      </button>
      <div class="topbar-right">
        <TenantPicker />
        <button type="button" class="button icon quiet" aria-label={themeLabel} title={themeLabel} onClick={() => setTheme(dark ? "light" : "dark")}>
          <Icon name={dark ? "sun" : "moon"} />
        </button>
      </div>
    </header>
  );
}

/** Only API keys of operators may act for another tenant; all others see the name of theirs. */
function TenantPicker() {
  const signedIn = useStore(caller);
  if (signedIn === null) return null;
  if (signedIn.is_operator && signedIn.kind === "key") return <TenantChoice own={signedIn.tenant} />;
  return signedIn.tenant === "" ? null : <span class="badge plain" title="Your tenant">{signedIn.tenant}</span>;
}

function TenantChoice({ own }: { own: string }) {
  const tenant = useStore(actingTenant);
  const { typed, setTyped, found, isLong, reload } = useSearch({ name: "tenants", load: loadTenants });
  const names = found.options.map((option) => option.value).filter((name) => name !== own);
  // Browsers report a change with each key that is pressed in a closed choice. The tenants on the way are not switched to.
  const [marked, setMarked] = useState(tenant);
  const isByKey = useRef(false);
  useEffect(() => setMarked(tenant), [tenant]);
  const choose = (name: string) => {
    setMarked(name);
    if (!isByKey.current) switchTenant(name);
  };
  const focus = () => {
    isByKey.current = false;
    reload();
  };
  const apply = () => marked !== tenant && switchTenant(marked);
  const onKeyDown = (event: KeyboardEvent) => {
    isByKey.current = true;
    if (event.key === "Enter") apply();
    if (event.key === "Escape") setMarked(tenant);
  };
  return (
    <span class="tenant-choice">
      {isLong && (
        <input class="input" type="search" aria-label="Search tenants" placeholder="Search tenants" value={typed}
          onInput={(event) => setTyped(event.currentTarget.value)} />
      )}
      <label class="row nowrap">
        <span class="muted visually-hidden">Tenant</span>
        <select class="input" value={marked} title="The tenant that the pages of the group Webhooks show" onFocus={focus} onBlur={apply}
          onKeyDown={onKeyDown} onPointerDown={() => (isByKey.current = false)} onChange={(event) => choose(event.currentTarget.value)}>
          <option value="">{own} (own)</option>
          {tenant !== "" && !names.includes(tenant) && <option value={tenant}>{tenant}</option>}
          {marked !== "" && marked !== tenant && !names.includes(marked) && <option value={marked}>{marked}</option>}
          {names.map((name) => <option key={name} value={name}>{name}</option>)}
        </select>
      </label>
      {marked !== tenant && <span class="muted nowrap" role="status">Enter switches</span>}
    </span>
  );
}

/** In an iframe the host page has its own frame; a row of tabs is enough. */
function EmbeddedTabs({ currentPath }: { currentPath: string }) {
  const pages = useVisiblePages().filter((page) => page.group === "" || page.group === "Webhooks");
  return (
    <nav class="tabs" aria-label="Pages">
      {pages.map((page) => (
        <a key={page.path} class="tab" href={link(page.path)} aria-current={page.path === currentPath ? "page" : undefined}>{page.label}</a>
      ))}
    </nav>
  );
}
