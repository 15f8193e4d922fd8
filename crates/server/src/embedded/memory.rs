//! The memory settings of the embedded PostgreSQL, scaled to the machine.
//!
//! They are modest: Pillarbox itself and the other programs of the machine also need memory.

use std::fs;

const MB: u64 = 1024 * 1024;
/// Assumed if the memory of the machine cannot be determined.
const MEMORY_ASSUMED: u64 = 1024 * MB;

/// The settings for this machine, as arguments of `-c`.
pub(super) fn settings() -> [String; 4] {
    settings_for(memory())
}

fn settings_for(memory: u64) -> [String; 4] {
    let share = |divisor: u64, least: u64, most: u64| (memory / divisor / MB).clamp(least, most);
    [
        format!("shared_buffers={}MB", share(8, 128, 2_048)),
        // How much PostgreSQL assumes to be cached, by itself and by the kernel. It allocates nothing.
        format!("effective_cache_size={}MB", share(2, 256, 1_024 * 1_024)),
        // For each sort or hash of each connection.
        format!("work_mem={}MB", share(512, 4, 16)),
        format!("maintenance_work_mem={}MB", share(32, 64, 512)),
    ]
}

/// The memory of the machine, or that of the container if it is less.
fn memory() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let machine =
        meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.strip_suffix("kB")?.trim().parse().ok());
    let machine = machine.map_or(MEMORY_ASSUMED, |kib: u64| kib * 1024);
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limit = limits.iter().filter_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok()).min();
    limit.map_or(machine, |limit: u64| machine.min(limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_settings_grow_with_the_machine_within_bounds() {
        let of = |gigabytes: u64| settings_for(gigabytes * 1024 * MB).join(" ");
        assert_eq!(
            of(0),
            "shared_buffers=128MB effective_cache_size=256MB work_mem=4MB maintenance_work_mem=64MB",
            "the smallest machine has PostgreSQL's own defaults"
        );
        assert_eq!(of(8), "shared_buffers=1024MB effective_cache_size=4096MB work_mem=16MB maintenance_work_mem=256MB");
        assert_eq!(
            of(64),
            "shared_buffers=2048MB effective_cache_size=32768MB work_mem=16MB maintenance_work_mem=512MB"
        );
        assert!(memory() > 64 * MB);
    }
}
