//! What a process used, as the system counts it.

use std::collections::BTreeMap;
use std::fs;

/// Resident bytes.
pub fn resident(pid: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: f64 = line
        .and_then(|line| line.trim().strip_suffix(" kB"))
        .and_then(|kib| kib.trim().parse().ok())
        .expect("a process that runs has resident memory");
    kib * 1_024.0
}

/// Seconds on a processor so far, of the threads that run now.
pub fn cpu(pid: u32) -> f64 {
    cpu_by_thread(pid).values().sum()
}

/// The same by the names of its threads.
pub fn cpu_by_thread(pid: u32) -> BTreeMap<String, f64> {
    let mut by_name = BTreeMap::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let task = task.unwrap().path();
        // A thread may end meanwhile.
        let (Ok(name), Ok(times)) = (
            fs::read_to_string(task.join("comm")),
            fs::read_to_string(task.join("schedstat")),
        ) else {
            continue;
        };
        let nanos = times.split(' ').next().and_then(|nanos| nanos.parse().ok());
        let nanos: f64 = nanos.expect("the system counts the time of threads");
        *by_name.entry(name.trim().to_owned()).or_default() += nanos / 1e9;
    }
    by_name
}

/// Bytes that it caused to be written to disks so far.
pub fn written(pid: u32) -> f64 {
    let io = fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
    let line = io
        .lines()
        .find_map(|line| line.strip_prefix("write_bytes: "));
    line.and_then(|bytes| bytes.parse().ok())
        .expect("the system counts what its processes write")
}
