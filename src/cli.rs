//! Commands of the one binary.

mod store;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

use crate::boot::{self, DemoOptions, Failure};
use crate::check;
use crate::config::{Config, Layer};
use crate::telemetry;

use self::store::StoreCommand;

/// Durable program-aware admission for SGLang fleets.
#[derive(Parser, Debug)]
#[command(name = "kvgate", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run the coordinator beside a fleet
    Serve {
        /// TOML file with settings; names are the flags' with `_`
        #[arg(long, value_name = "FILE", env = "KVGATE_CONFIG")]
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
    Check {
        /// TOML file with settings
        #[arg(long, value_name = "FILE", env = "KVGATE_CONFIG")]
        config: Option<PathBuf>,
        /// Form of the answer
        #[arg(short = 'o', long, value_enum, default_value_t = Output::Table)]
        output: Output,
        #[command(flatten)]
        settings: Box<Layer>,
    },
    /// Look into, check, copy, restore and set aside a store that no service uses
    Store {
        #[command(subcommand)]
        command: StoreCommand,
    },
    /// Print the OpenAPI document
    Openapi,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Table,
    Json,
}

/// Runs the command of this process. Data goes to stdout, messages to stderr.
#[must_use]
pub fn run() -> ExitCode {
    let cli = Cli::parse();
    match dispatch(cli.command) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("kvgate: {failure}");
            failure.exit_code()
        }
    }
}

fn dispatch(command: Command) -> Result<ExitCode, Failure> {
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
                for shown in &config.shown {
                    println!(
                        "{} = {}  # {}",
                        shown.name,
                        shown.value,
                        shown.origin.word()
                    );
                }
                return Ok(ExitCode::SUCCESS);
            }
            telemetry::start_logging(config.log_json);
            boot::serve(config)?;
            Ok(ExitCode::SUCCESS)
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
            Ok(ExitCode::SUCCESS)
        }
        Command::Check {
            config,
            output,
            settings,
        } => {
            let config = Config::load(*settings, environment(), config.as_deref())?;
            let findings = boot::check(&config)?;
            check::write(
                &findings,
                output == Output::Json,
                &mut std::io::stdout().lock(),
            )
            .map_err(Failure::other)?;
            let mend = findings
                .iter()
                .any(|finding| finding.weight == check::Weight::Mend);
            Ok(ExitCode::from(u8::from(mend)))
        }
        Command::Store { command } => store::run(command),
        Command::Openapi => {
            println!("{}", crate::http::openapi());
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Variables that are text; others cannot be settings.
fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}
