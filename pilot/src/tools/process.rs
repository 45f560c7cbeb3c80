//! Processes as `/proc` shows them, and how to end a whole family of them for certain.

use std::{
    collections::{HashMap, HashSet},
    fs, io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    process::{Pid, PidfdFlags, Signal},
};
use serde::{Deserialize, Serialize};

/// A process that no later process can be taken for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMark {
    /// Number; used again after its end.
    pub pid: i32,
    /// Clock ticks from boot to its start.
    pub start_ticks: u64,
    /// Which boot.
    pub boot_id: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    pid: i32,
    parent: i32,
    session: i32,
    start_ticks: u64,
    dead: bool,
}

/// The calling process.
pub fn myself() -> io::Result<ProcessMark> {
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    let entry = entry(pid).ok_or_else(|| io::Error::other("/proc does not show this process"))?;
    Ok(ProcessMark {
        pid,
        start_ticks: entry.start_ticks,
        boot_id: boot_id()?,
    })
}

/// Ends every process of this process's session and every descendant but itself: SIGTERM, and
/// SIGKILL after `grace`. True when all are gone.
pub fn end_family(grace: Duration) -> io::Result<bool> {
    let me = myself()?;
    end_all(
        || {
            family(me.pid)
                .into_iter()
                .filter(|e| e.pid != me.pid)
                .collect()
        },
        grace,
    )
}

/// Ends what the process `mark` left behind in the session it led. Does nothing while it lives,
/// after a reboot, or when its number belongs to another process by now.
pub fn end_orphans(mark: &ProcessMark, grace: Duration) -> io::Result<bool> {
    if boot_id()? != mark.boot_id || entry(mark.pid).is_some_and(|e| !e.dead) {
        return Ok(true);
    }
    // The number of a session cannot be given away while the session has members.
    let born_later = |e: &Entry| e.session == mark.pid && e.start_ticks >= mark.start_ticks;
    end_all(
        || {
            table()
                .into_values()
                .filter(|e| !e.dead && born_later(e))
                .collect()
        },
        grace,
    )
}

fn end_all(members: impl Fn() -> Vec<Entry>, grace: Duration) -> io::Result<bool> {
    let begun = Instant::now();
    let mut asked = HashSet::new();
    let give_up = grace + Duration::from_secs(10);
    loop {
        let alive = members();
        if alive.is_empty() {
            return Ok(true);
        }
        let waited = begun.elapsed();
        if waited >= give_up {
            return Ok(false);
        }
        let (signal, patience) = match grace.checked_sub(waited) {
            Some(left) if !left.is_zero() => (Signal::TERM, left),
            _ => (Signal::KILL, Duration::from_secs(1)),
        };
        let handles: Vec<OwnedFd> = alive
            .iter()
            .filter_map(|e| {
                // A request is made once: a program may need its time to clean up.
                let first = asked.insert((e.pid, e.start_ticks));
                send(e, (first || signal == Signal::KILL).then_some(signal))
            })
            .collect();
        wait_any(&handles, patience.min(Duration::from_millis(200)))?;
    }
}

/// A handle on exactly this process, signalled: the number is checked again once the handle
/// holds it.
fn send(target: &Entry, signal: Option<Signal>) -> Option<OwnedFd> {
    let handle =
        rustix::process::pidfd_open(Pid::from_raw(target.pid)?, PidfdFlags::empty()).ok()?;
    let now = entry(target.pid)?;
    if now.start_ticks != target.start_ticks {
        return None;
    }
    if let Some(signal) = signal {
        rustix::process::pidfd_send_signal(&handle, signal).ok()?;
    }
    Some(handle)
}

fn wait_any(handles: &[OwnedFd], patience: Duration) -> io::Result<()> {
    let mut polled: Vec<PollFd<'_>> = handles
        .iter()
        .map(|h| PollFd::new(h, PollFlags::IN))
        .collect();
    let timeout = Timespec::try_from(patience).map_err(io::Error::other)?;
    match rustix::event::poll(&mut polled, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn family(leader: i32) -> Vec<Entry> {
    let all = table();
    let descends = |mut at: Entry| {
        for _ in 0..64 {
            if at.parent == leader {
                return true;
            }
            match all.get(&at.parent) {
                Some(parent) => at = *parent,
                None => return false,
            }
        }
        false
    };
    all.values()
        .copied()
        .filter(|e| !e.dead && (e.session == leader || descends(*e)))
        .collect()
}

fn table() -> HashMap<i32, Entry> {
    let Ok(listing) = fs::read_dir("/proc") else {
        return HashMap::new();
    };
    listing
        .flatten()
        .filter_map(|found| found.file_name().to_str()?.parse().ok())
        .filter_map(entry)
        .map(|e| (e.pid, e))
        .collect()
}

fn entry(pid: i32) -> Option<Entry> {
    parse(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse(pid: i32, stat: &str) -> Option<Entry> {
    // The second field is the program's name in brackets, and may hold spaces and brackets.
    let rest = &stat[stat.rfind(')')? + 1..];
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    Some(Entry {
        pid,
        parent: fields.get(1)?.parse().ok()?,
        session: fields.get(3)?.parse().ok()?,
        start_ticks: fields.get(19)?.parse().ok()?,
        dead: matches!(*fields.first()?, "Z" | "X"),
    })
}

fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_does_not_shift_the_fields() {
        let stat = "42 (a) b (c)) S 7 42 40 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987 0 0";
        let expected = Entry {
            pid: 42,
            parent: 7,
            session: 40,
            start_ticks: 987,
            dead: false,
        };
        assert_eq!(parse(42, stat), Some(expected));
        assert_eq!(parse(42, "42 (x"), None);
        assert_eq!(parse(42, "42 (x) S 1 2"), None);
    }

    #[test]
    fn a_mark_is_of_this_boot_and_this_process() {
        let mark = myself().unwrap();
        assert_eq!(mark.pid as u32, std::process::id());
        assert_eq!(mark, myself().unwrap());
        // It lives, so it has left nothing behind.
        assert!(end_orphans(&mark, Duration::ZERO).unwrap());
    }
}
