//! `kvgate man`: one manual page for all commands, from the same description as `--help`.

use std::io::{self, Write};

use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

/// Exit codes, as in the README.
const EXIT_CODES: &[(&str, &str)] = &[
    ("0", "done"),
    (
        "1",
        "a check found something to mend, the service is not well, it refused, or a bench does not add up",
    ),
    ("2", "usage or configuration"),
    ("65", "the store is damaged, or is not a store"),
    ("69", "cannot listen, or no service answers"),
    ("74", "disk full or I/O error at start"),
    ("75", "the store is in use by another process"),
    ("77", "no permission"),
    ("78", "the store was written by a newer version"),
    ("130", "interrupted"),
];

const FILES: &[(&str, &str)] = &[
    ("DATA/kvgate.redb", "the store"),
    ("DATA/kvgate.ballast", "room for commits on a full disk"),
    ("DATA/history.rings", "figures over time"),
    ("DATA/address", "the bound addresses, one a line"),
];

/// Writes the page in roff.
pub(super) fn write(mut command: Command, out: &mut dyn Write) -> io::Result<()> {
    command.build();
    let subcommands: Vec<Command> = command.get_subcommands().cloned().collect();
    let man = Man::new(command).section("1").manual("kvgate");
    man.render_title(out)?;
    man.render_name_section(out)?;
    man.render_synopsis_section(out)?;
    man.render_description_section(out)?;
    for subcommand in subcommands {
        if subcommand.get_name() != "help" {
            write_command(&subcommand, out)?;
        }
    }
    let mut roff = Roff::new();
    table(&mut roff, "FILES", FILES);
    table(&mut roff, "EXIT STATUS", EXIT_CODES);
    roff.control("SH", ["NOTES"]);
    roff.text([roman(
        "The flags of features and of admission are also taken with the prefix --agentic-, such as \
         --agentic-program-admission.",
    )]);
    roff.control("SH", ["ENVIRONMENT"]);
    roff.text([roman(
        "Every setting of serve has a variable: KVGATE_ and the name of its flag in capitals with _ for -, lists by \
         comma. RUST_LOG sets what is logged, NO_COLOR switches colour off.",
    )]);
    roff.to_writer(out)
}

/// One command: its words, its usage and its options; commands below it follow.
fn write_command(command: &Command, out: &mut dyn Write) -> io::Result<()> {
    let mut command = command.clone();
    let usage = command.render_usage().to_string();
    let name = command
        .get_bin_name()
        .unwrap_or_else(|| command.get_name())
        .to_uppercase();
    let mut roff = Roff::new();
    roff.control("SH", [name.as_str()]);
    if let Some(about) = command.get_about() {
        roff.text([roman(about.to_string())]);
        roff.control("PP", []);
    }
    roff.text([bold(usage.trim_start_matches("Usage: "))]);
    roff.to_writer(out)?;
    let mut options = Vec::new();
    Man::new(command.clone()).render_options_section(&mut options)?;
    // The options belong to the command's own section, and so do groups of them.
    let options = String::from_utf8_lossy(&options)
        .replace(".SH OPTIONS\n", ".PP\n")
        .replace(".SH ", ".SS ");
    out.write_all(options.as_bytes())?;
    if let Some(more) = command.get_after_help() {
        let mut roff = Roff::new();
        // Examples keep their lines.
        roff.control("PP", []).control("nf", []);
        for line in more.to_string().lines() {
            roff.text([roman(line)]);
        }
        roff.control("fi", []);
        roff.to_writer(out)?;
    }
    for below in command.get_subcommands() {
        if below.get_name() != "help" {
            write_command(below, out)?;
        }
    }
    Ok(())
}

fn table(roff: &mut Roff, title: &str, rows: &[(&str, &str)]) {
    roff.control("SH", [title]);
    for (name, meaning) in rows {
        roff.control("TP", []);
        roff.text([bold(*name)]);
        roff.text([roman(*meaning)]);
    }
}
