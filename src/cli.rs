//! Commands of the one binary.

mod act;
mod bench;
mod client;
mod closes;
mod health;
mod leases;
mod list;
mod man;
mod out;
mod queue;
mod settings;
mod state;
mod steps;
mod store;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use serde::Serialize;
use serde_json::Value;

use crate::boot::{self, DemoOptions, Failure};
use crate::check;
use crate::config::{self, Config, ConfigError, Layer};
use crate::telemetry;

use self::client::CallError;
use self::store::StoreCommand;

const EXIT_CODES: &str = "\
Exit codes:
  0   done
  1   a check found something to mend, or the service refused
  2   usage or configuration
  65  the store is damaged, or is not a store
  69  cannot listen, or no service answers
  74  disk full, or an input or output error
  75  the store is in use by another process
  77  no permission
  78  the store was written by a newer version
  130 interrupted

One line on stderr says what to do. Data goes to stdout, messages to stderr; colour only on a terminal \
and never with NO_COLOR.

Start here:
  kvgate demo                                              everything on this machine, no GPU
  kvgate check --router http://127.0.0.1:30000             what is to be mended in a fleet
  kvgate serve --router http://127.0.0.1:30000 --program-admission --session-lifecycle
  kvgate state                                             what a running service does now";

const SERVE_HELP: &str = "\
Each setting may also stand in the file of --config, under its name with `_` (`max_waiting = 5000`), \
and in the environment, as KVGATE_ and the same in capitals (KVGATE_MAX_WAITING=5000; lists by comma). \
Flags win over the environment, the environment over the file. Unknown names are refused. What is set \
at run time (`kvgate settings set`) wins over all of them until it is reset.

The limits of admission numbers hold only while admission is on.

Exit codes: 0 stopped in an orderly way; 2 configuration; 65 not a store, or damaged; 69 cannot listen; \
74 input or output; 75 store in use; 77 no permission; 78 store of a newer version.

Examples:
  kvgate serve --router http://127.0.0.1:30000 --program-admission
  kvgate serve --engine http://10.0.0.1:30000 --engine http://10.0.0.2:30000 --session-lifecycle
  kvgate serve --config kvgate.toml --print-config";

const CHECK_HELP: &str = "\
Takes the settings of `kvgate serve`, so that it checks what that would run with. Engines and router \
are only read. What spoils session closes is to be mended only with --session-lifecycle.

Exit codes: 0 nothing to mend; 1 something is; 2 configuration.

Examples:
  kvgate check --router http://127.0.0.1:30000 --session-lifecycle
  kvgate check --config kvgate.toml -o json | jq '.[] | select(.weight == \"mend\")'";

const READ_HELP: &str = "\
Needs a token of any scope where the service asks for tokens. Certificates of https addresses are \
checked against the system's authorities, or those of SSL_CERT_FILE.

Exit codes: 0 done; 1 the service refused; 2 usage; 69 no service answers.";

const QUEUE_EXAMPLES: &str = "\
Examples:
  kvgate queue
  kvgate queue --client rollout-3 --limit 10
  kvgate queue --all -o json | jq '[.items[].reservation_tokens] | add'";

const LEASES_EXAMPLES: &str = "\
Examples:
  kvgate leases --session s-7
  kvgate leases revoke LEASE_ID";

const CLOSES_EXAMPLES: &str = "\
Examples:
  kvgate closes --state delivering
  kvgate closes retry CLOSE_ID";

const STEPS_EXAMPLES: &str = "\
Examples:
  kvgate steps --run exp-7 --limit 5
  kvgate steps current --run exp-7";

const SETTINGS_EXAMPLES: &str = "\
Examples:
  kvgate settings
  kvgate settings set headroom=0.85 max_wait_s=60
  kvgate settings reset headroom";

const COMPLETIONS_HELP: &str = "\
Examples:
  kvgate completions bash > ~/.local/share/bash-completion/completions/kvgate
  kvgate completions zsh > \"${fpath[1]}/_kvgate\"
  kvgate completions fish > ~/.config/fish/completions/kvgate.fish";

/// Durable program-aware admission for SGLang fleets.
#[derive(Parser, Debug)]
#[command(name = "kvgate", version, about, max_term_width = 100, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run the coordinator beside a fleet
    #[command(after_help = SERVE_HELP)]
    Serve {
        /// TOML file with settings; names are the flags' with `_`
        #[arg(
            long,
            value_name = "FILE",
            env = "KVGATE_CONFIG",
            hide_env_values = true
        )]
        config: Option<PathBuf>,
        /// Print every value with its origin, and end
        #[arg(long)]
        print_config: bool,
        /// Forget the settings that were set at run time: all values are as configured again
        #[arg(long)]
        reset_settings: bool,
        #[command(flatten)]
        settings: Box<Layer>,
    },
    /// Run everything on this machine without a GPU: a fleet, agents, and the coordinator
    Demo {
        /// Address of API and page
        #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:7070")]
        listen: String,
        /// Directory of the store; a temporary one without it
        #[arg(long, value_name = "DIR")]
        data: Option<PathBuf>,
        /// File with the tokens of callers: lines `name:scope:token`
        #[arg(long, value_name = "FILE")]
        token_file: Option<PathBuf>,
        /// Agent sessions at a time; 0 runs the fleet for callers of your own
        #[arg(long, value_name = "COUNT", default_value_t = 200)]
        sessions: u64,
        /// How much faster than life the agents and engines run
        #[arg(long, value_name = "FACTOR", default_value_t = crate::demo::DEMO_SPEED)]
        speed: f64,
        /// Draws everything that is drawn
        #[arg(long, value_name = "NUMBER", default_value_t = 1)]
        seed: u64,
    },
    /// Ask router and engines once and say what is to be mended
    #[command(after_help = CHECK_HELP)]
    Check {
        /// TOML file with settings; names are the flags' with `_`
        #[arg(
            long,
            value_name = "FILE",
            env = "KVGATE_CONFIG",
            hide_env_values = true
        )]
        config: Option<PathBuf>,
        /// Form of the answer
        #[arg(short = 'o', long, value_enum, default_value_t = Output::Table)]
        output: Output,
        #[command(flatten)]
        settings: Box<Layer>,
    },
    /// Measure what a service gives: pairs of acquire and release, latency, commits, processor time
    #[command(after_help = bench::HELP)]
    Bench(Box<bench::Bench>),
    /// Look into, check, copy, restore and set aside a store that no service uses
    Store {
        #[command(subcommand)]
        command: StoreCommand,
    },
    /// Show what a running service does now: budget, queue, pressure, closes, and what is wrong
    #[command(after_help = READ_HELP)]
    State(state::Asked),
    /// Show who waits, from the head
    #[command(after_help = format!("{READ_HELP}\n\n{QUEUE_EXAMPLES}"))]
    Queue(queue::Queue),
    /// Show who holds how much, or end leases
    #[command(after_help = format!("{READ_HELP}\n\n{LEASES_EXAMPLES}"))]
    Leases(leases::Leases),
    /// Show how far session closes have come, or send failed ones again
    #[command(after_help = format!("{READ_HELP}\n\n{CLOSES_EXAMPLES}"))]
    Closes(closes::Closes),
    /// Show step reports as they were taken, or the window that goes on
    #[command(after_help = format!("{READ_HELP}\n\n{STEPS_EXAMPLES}"))]
    Steps(steps::Steps),
    /// Show or change what can be changed while the service runs
    #[command(after_help = format!("{READ_HELP}\n\n{SETTINGS_EXAMPLES}"))]
    Settings(settings::Settings),
    /// Show what operators did, newest first
    #[command(after_help = READ_HELP)]
    Audit(settings::Audit),
    /// Ask a running service whether it is alive; for health checks of containers
    Health {
        #[command(flatten)]
        asked: health::Asked,
    },
    /// Print the manual page: `kvgate man > kvgate.1`
    Man,
    /// Print the OpenAPI document
    Openapi,
    /// Print a script that completes commands and flags in a shell
    #[command(after_help = COMPLETIONS_HELP)]
    Completions {
        /// The shell
        #[arg(value_name = "SHELL")]
        shell: Shell,
    },
}

/// Why a command was not done.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error(transparent)]
    Failure(#[from] Failure),
    #[error(transparent)]
    Call(#[from] CallError),
}

impl From<ConfigError> for Ended {
    fn from(error: ConfigError) -> Self {
        Self::Failure(error.into())
    }
}

impl Ended {
    fn exit_code(&self) -> ExitCode {
        match self {
            Self::Failure(failure) => failure.exit_code(),
            Self::Call(error) => error.exit_code(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Table,
    Json,
}

/// Everything that the command line takes, with the defaults and variables of the settings in the help.
fn command() -> clap::Command {
    ["serve", "check"]
        .into_iter()
        .fold(Cli::command(), |command, name| {
            command.mut_subcommand(name, |command| command.mut_args(config::described))
        })
}

/// Runs the command of this process. Data goes to stdout, messages to stderr.
#[must_use]
pub fn run() -> ExitCode {
    let matches = command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match dispatch(cli.command) {
        Ok(code) => code,
        Err(ended) => {
            out::say(&ended.to_string());
            ended.exit_code()
        }
    }
}

fn dispatch(command: Command) -> Result<ExitCode, Ended> {
    match command {
        Command::Serve {
            config,
            print_config,
            reset_settings,
            settings,
        } => {
            let mut config = Config::load(*settings, environment(), config.as_deref())?;
            config.reset_settings = reset_settings;
            if print_config {
                out::print_raw(&config.printed())?;
                return Ok(ExitCode::SUCCESS);
            }
            telemetry::start_logging(config.log_json);
            boot::serve(config)?;
        }
        Command::Demo {
            listen,
            data,
            token_file,
            sessions,
            speed,
            seed,
        } => {
            telemetry::start_logging(false);
            boot::demo(DemoOptions {
                listen,
                data,
                token_file,
                sessions,
                speed,
                seed,
            })?;
        }
        Command::Check {
            config,
            output,
            settings,
        } => {
            let config = Config::load(*settings, environment(), config.as_deref())?;
            return check(&config, output);
        }
        Command::Bench(bench) => return bench::run(&bench),
        Command::Store { command } => return Ok(store::run(command)?),
        Command::Health { asked } => return Ok(health::run(&asked)?),
        Command::Man => {
            let mut page = Vec::new();
            man::write(self::command(), &mut page).map_err(Failure::other)?;
            out::print_raw(&String::from_utf8_lossy(&page))?;
        }
        Command::State(asked) => state::run(&asked)?,
        Command::Queue(asked) => queue::run(&asked)?,
        Command::Leases(asked) => return leases::run(&asked),
        Command::Closes(asked) => return closes::run(&asked),
        Command::Steps(asked) => steps::run(&asked)?,
        Command::Settings(asked) => settings::run(asked)?,
        Command::Audit(asked) => settings::audit(&asked)?,
        Command::Openapi => out::print_raw(&format!("{}\n", crate::http::openapi()))?,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut self::command(), "kvgate", &mut script);
            out::print_raw(&String::from_utf8_lossy(&script))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn check(config: &Config, output: Output) -> Result<ExitCode, Ended> {
    let findings = boot::check(config)?;
    match output {
        Output::Json => out::print_json(&findings)?,
        Output::Table => out::print(&findings.iter().map(finding).collect::<String>())?,
    }
    let mend = findings
        .iter()
        .filter(|finding| finding.weight == check::Weight::Mend)
        .count();
    if mend > 0 {
        out::say(&format!("{mend} to mend; each says what to do"));
    }
    Ok(ExitCode::from(u8::from(mend > 0)))
}

/// What was found, and below it what to do. Addresses come from the router.
fn finding(finding: &check::Finding) -> String {
    let (style, word) = match finding.weight {
        check::Weight::Ok => (out::GOOD, "ok"),
        check::Weight::Note => (out::DIM, "note"),
        check::Weight::Mend => (out::BAD, "MEND"),
    };
    let word = out::styled(style, &format!("{word:<5}"));
    let subject = out::plain(&finding.subject);
    let mut text = format!("{word} {subject}: {}\n", out::plain(&finding.text));
    if let Some(advice) = &finding.advice {
        text.push_str(&format!("      {}\n", out::plain(advice)));
    }
    text
}

/// A word of the API, as it stands there.
fn word(word: &impl Serialize) -> String {
    match serde_json::to_value(word) {
        Ok(Value::String(word)) => word,
        _ => table::NOTHING.to_owned(),
    }
}

/// The word of an answer that says how an act went.
fn outcome(body: &Value, field: &str) -> String {
    let word = body.get(field).and_then(Value::as_str);
    word.unwrap_or("done").to_owned()
}

/// Variables that are text; others cannot be settings.
fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}
