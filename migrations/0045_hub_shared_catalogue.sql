-- schema: pillarbox_hub
-- The catalogue of the tenant main can be shared: tenants without a catalogue of their own then use it.

alter table pillarbox_hub.catalogue
    add column is_shared boolean not null default false,
    add constraint catalogue_shared_check check (not is_shared or tenant = 'main');
