//! `kvgate store`: commands on a store that no service uses. One sentence on stderr when one is not
//! done; data on stdout.

use std::fs::File;
use std::io::{self, BufReader, BufWriter};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::json;

use super::Output;
use super::out::print_raw as print;
use crate::boot::Failure;
use crate::clock::{self, Clock};
use crate::store::{self, CopyError, Look, OfflineError, OpenError};

/// Stands for stdin or stdout.
const STREAM: &str = "-";

/// What is done with a store.
#[derive(Subcommand, Debug)]
pub(super) enum StoreCommand {
    /// Print what the store holds
    Inspect {
        #[command(flatten)]
        data: Data,
        /// Form of the answer
        #[arg(short = 'o', long, value_enum, default_value_t = Output::Table)]
        output: Output,
    },
    /// Check every page, row and sum of the store
    Verify {
        #[command(flatten)]
        data: Data,
    },
    /// Write a logical copy of the store
    Backup {
        /// Where to; `-` is stdout. A file that exists is left as it is
        #[arg(value_name = "FILE", default_value = STREAM)]
        to: PathBuf,
        #[command(flatten)]
        data: Data,
    },
    /// Make a new store from a logical copy, where there is none
    Restore {
        /// What `kvgate store backup` or `GET /v1/backup` wrote; `-` is stdin
        #[arg(value_name = "BACKUP")]
        from: PathBuf,
        #[command(flatten)]
        data: Data,
    },
    /// Rename the store, whatever it is, so that the next start begins empty; nothing is deleted
    Reset {
        #[command(flatten)]
        data: Data,
    },
}

/// Which store.
#[derive(Args, Debug)]
pub(super) struct Data {
    /// Directory of the store
    #[arg(
        long = "data",
        value_name = "DIR",
        env = "KVGATE_DATA",
        default_value = "./kvgate-data"
    )]
    directory: PathBuf,
}

/// Runs one of the commands.
pub(super) fn run(command: StoreCommand) -> Result<ExitCode, Failure> {
    match command {
        StoreCommand::Inspect { data, output } => {
            print(&inspected(&store::look(&data.directory)?, output))?;
        }
        StoreCommand::Verify { data } => {
            let look = store::look(&data.directory)?;
            let found = look.verify()?;
            print(&format!(
                "{} is whole: {} leases of {} tokens, {} waiting, {} closes open\n",
                look.path.display(),
                found.leases,
                found.reserved,
                found.waiting,
                found.closes_open
            ))?;
        }
        StoreCommand::Backup { to, data } => backup(&data.directory, &to)?,
        StoreCommand::Restore { from, data } => {
            let now = Clock::start().now();
            let look = if from == Path::new(STREAM) {
                store::restore(&data.directory, io::stdin().lock(), now)?
            } else {
                let file = File::open(&from).map_err(|error| unreadable(&from, error))?;
                store::restore(&data.directory, BufReader::new(file), now)?
            };
            let found = look.inspect();
            print(&format!(
                "{} holds {} leases of {} tokens and {} waiting, with {} closes open; seq goes on from {}, epoch is {}\n",
                look.path.display(),
                found.leases,
                found.reserved,
                found.waiting,
                found.closes_open,
                look.image().seq.0,
                found.epoch
            ))?;
        }
        StoreCommand::Reset { data } => {
            let stamp = clock::file_stamp(Clock::start().now());
            let aside = store::reset(&data.directory, &stamp)?;
            print(&format!("the store is now {}\n", aside.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A backup that cannot be opened: no permission has its own exit code.
fn unreadable(path: &Path, error: io::Error) -> OfflineError {
    match error.kind() {
        io::ErrorKind::PermissionDenied => OpenError::Permission(path.to_path_buf(), error).into(),
        _ => CopyError::Io(io::Error::new(
            error.kind(),
            format!("{}: {error}", path.display()),
        ))
        .into(),
    }
}

/// To a file: made beside it and put in place when it is whole and on stable storage.
fn backup(directory: &Path, to: &Path) -> Result<(), Failure> {
    let look = store::look(directory)?;
    if to == Path::new(STREAM) {
        store::backup(look, &mut BufWriter::new(io::stdout().lock()))?;
        return Ok(());
    }
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::PermissionDenied => {
            OfflineError::from(OpenError::Permission(to.to_path_buf(), error))
        }
        io::ErrorKind::AlreadyExists => OfflineError::CopyExists(to.to_path_buf()),
        _ => OfflineError::Write(io::Error::new(
            error.kind(),
            format!("{}: {error}", to.display()),
        )),
    };
    if to.symlink_metadata().is_ok() {
        return Err(OfflineError::CopyExists(to.to_path_buf()).into());
    }
    let parent = match to.parent() {
        Some(parent) if parent != Path::new("") => parent,
        Some(_) | None => Path::new("."),
    };
    let mut file = tempfile::Builder::new()
        .prefix(".kvgate-backup-")
        .tempfile_in(parent)
        .map_err(failed)?;
    store::backup(look, &mut BufWriter::new(file.as_file_mut()))?;
    file.as_file().sync_all().map_err(failed)?;
    file.persist_noclobber(to)
        .map_err(|error| failed(error.error))?;
    File::open(parent)
        .and_then(|parent| parent.sync_all())
        .map_err(failed)?;
    Ok(())
}

fn inspected(look: &Look, output: Output) -> String {
    let image = look.image();
    let found = look.inspect();
    let oldest = found.oldest_lease.map(clock::text);
    let stored_at = clock::text(image.now);
    let path = look.path.display().to_string();
    if output == Output::Json {
        let value = json!({
            "path": path,
            "schema": look.schema(),
            "bytes": look.bytes(),
            "clean": look.clean(),
            "term": image.term,
            "seq": image.seq.0,
            "epoch": found.epoch,
            "stored_at": stored_at,
            "leases": found.leases,
            "reserved_tokens": found.reserved,
            "oldest_lease_at": oldest,
            "waiting": found.waiting,
            "waiting_tokens": found.waiting_tokens,
            "ended": found.ended,
            "closes_open": found.closes_open,
            "closes_finished": found.closes_finished,
            "closes_failed": found.closes_failed,
            "sessions": found.sessions,
            "steps": found.steps,
            "runs": found.runs,
            "run_time_settings": found.settings,
            "audit": image.audit.len(),
            "starts": image.starts.len(),
            "epochs": image.epochs.len(),
            "engines": image.engines.len(),
        });
        return format!("{value}\n");
    }
    let rows = [
        ("store", path),
        ("schema", look.schema().to_string()),
        ("bytes", look.bytes().to_string()),
        (
            "last stop",
            if look.clean() {
                "orderly"
            } else {
                "not orderly"
            }
            .to_owned(),
        ),
        ("term", image.term.to_string()),
        ("seq", image.seq.0.to_string()),
        ("epoch", found.epoch.to_string()),
        ("stored at", stored_at),
        (
            "leases",
            format!("{} of {} tokens", found.leases, found.reserved),
        ),
        ("oldest lease", oldest.unwrap_or_else(|| "none".to_owned())),
        (
            "waiting",
            format!("{} of {} tokens", found.waiting, found.waiting_tokens),
        ),
        ("ended", found.ended.to_string()),
        (
            "closes",
            format!(
                "{} open, {} finished ({} failed)",
                found.closes_open, found.closes_finished, found.closes_failed
            ),
        ),
        ("sessions", found.sessions.to_string()),
        (
            "step reports",
            format!("{}, {} runs", found.steps, found.runs),
        ),
        ("settings", format!("{} set at run time", found.settings)),
        ("audit", image.audit.len().to_string()),
        ("starts", image.starts.len().to_string()),
        ("epochs", image.epochs.len().to_string()),
        ("engines", image.engines.len().to_string()),
    ];
    rows.iter()
        .map(|(name, value)| format!("{name:<14}{value}\n"))
        .collect()
}
