//! `kvgate health`: one question to a running service, so that a container without other programs
//! can tell whether it is well.

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use reqwest::Client;
use reqwest::redirect::Policy;
use url::Url;

use crate::boot::{self, Failure};
use crate::config::ConfigError;

/// Where and what is asked.
#[derive(Args, Debug)]
pub(super) struct Asked {
    /// Address of the service, with the path prefix of a proxy where there is one
    #[arg(
        long,
        value_name = "URL",
        env = "KVGATE_URL",
        hide_env_values = true,
        default_value = "http://127.0.0.1:7070"
    )]
    url: String,
    /// Ask whether it decides (`/readyz`) instead of whether it is alive (`/healthz`)
    #[arg(long)]
    ready: bool,
    /// Longest time for the answer, in seconds: 0.1 to 60
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    timeout_s: f64,
}

/// 0 when the service is well, 1 with a line on stderr when it is not.
pub(super) fn run(asked: &Asked) -> Result<ExitCode, Failure> {
    let address = address(&asked.url, asked.ready)?;
    if !(0.1..=60.0).contains(&asked.timeout_s) {
        return Err(ConfigError::new("timeout-s must be 0.1 to 60").into());
    }
    let timeout = Duration::from_secs_f64(asked.timeout_s);
    let told = boot::prepare()?.0.block_on(ask(&address, timeout));
    match told {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(why) => {
            eprintln!("kvgate: {}: {why}", shown(address));
            Ok(ExitCode::FAILURE)
        }
    }
}

/// The health address below a base address.
fn address(base: &str, ready: bool) -> Result<Url, ConfigError> {
    let url = Url::parse(base)
        .ok()
        .filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
    let mut url = url.ok_or_else(|| {
        ConfigError::new("url must be an http or https address, such as http://127.0.0.1:7070")
    })?;
    let path = if ready { "readyz" } else { "healthz" };
    url.set_path(&format!("{}/{path}", url.path().trim_end_matches('/')));
    Ok(url)
}

async fn ask(address: &Url, timeout: Duration) -> Result<(), String> {
    // A proxy of the environment or a redirect would tell of something else.
    let client = Client::builder()
        .timeout(timeout)
        .redirect(Policy::none())
        .no_proxy()
        .build()
        .map_err(|error| error.to_string())?;
    let answer = client.get(address.clone()).send().await;
    match answer {
        Ok(answer) if answer.status().is_success() => Ok(()),
        Ok(answer) => Err(format!("answered {}", answer.status())),
        Err(error) if error.is_timeout() => Err("no answer in time".to_owned()),
        // A refused connection, or a certificate that is not trusted.
        Err(error) => Err(format!("no answer: {}", cause(&error))),
    }
}

/// What lies below all that wraps it.
fn cause(error: &dyn Error) -> String {
    let mut lowest = error;
    while let Some(below) = lowest.source() {
        lowest = below;
    }
    lowest.to_string()
}

/// Without user and password.
fn shown(mut address: Url) -> Url {
    // Fails only where an address can have none.
    let _ = address.set_username("");
    let _ = address.set_password(None);
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_keeps_a_prefix() {
        let text = |base, ready| address(base, ready).map(|url| url.to_string());
        assert_eq!(
            text("http://127.0.0.1:7070", false).unwrap(),
            "http://127.0.0.1:7070/healthz"
        );
        assert_eq!(
            text("https://gate.example/kvgate/", true).unwrap(),
            "https://gate.example/kvgate/readyz"
        );
        for bad in ["", "gate:7070", "file:///etc", "http://"] {
            assert!(text(bad, false).is_err(), "{bad}");
        }
        let secret = Url::parse("http://me:secret@127.0.0.1:7070/healthz").unwrap();
        assert_eq!(shown(secret).as_str(), "http://127.0.0.1:7070/healthz");
    }
}
