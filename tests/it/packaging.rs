//! What lies in `deploy/` is read, names settings and addresses that there are, and agrees with itself.
//! What the tools of others say of it is held by `deploy/check.py`.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use kvgate::config::{Config, Layer};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::process::{binary, command};

/// Flags of other programs that files and pages speak of, and those of access and of the run-time settings.
const FLAGS_OF_OTHERS: &[&str] = &[
    "--bench",
    "--bin",
    "--chown",
    "--disable-radix-cache",
    "--enable-session-radix-cache",
    "--from",
    "--from-file",
    "--head",
    "--interval",
    "--job-name",
    "--locked",
    "--mount",
    "--nodes",
    "--now",
    "--output",
    "--pipe",
    "--port",
    "--radix-eviction-policy",
    "--release",
    "--reset-settings",
    "--retries",
    "--runtime-env",
    "--signal",
    "--start-period",
    "--target",
    "--timeout",
    "--token-file",
    "--version",
    "--wait",
    "--working-dir",
];

/// Variables that are no settings of `kvgate serve`: of clients, commands and builds. The service may
/// refuse what it does not know, so launch scripts name theirs otherwise.
const VARIABLES_OF_OTHERS: &[&str] = &[
    "KVGATE_REVISION",
    "KVGATE_TOKEN",
    "KVGATE_TOKEN_FILE",
    "KVGATE_URL",
];

/// Codes of the README that a repeated start can mend; the rest needs somebody to look.
const RETRIED: &[u8] = &[0, 1, 69, 74, 75];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn file(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// Every file below `deploy/` that is ours to word: not the dashboard and the rules, which `deploy.rs` reads.
fn files() -> Vec<PathBuf> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    for folder in ["systemd", "docker", "kubernetes", "proxy", "slurm", "ray"] {
        walk(&root().join("deploy").join(folder), &mut found);
    }
    found.sort();
    found
}

fn yaml(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    serde_saphyr::from_multiple(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn words(text: &str, prefix: &str, is_part: fn(char) -> bool) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices(prefix) {
        let before = text[..at].chars().next_back();
        if before.is_some_and(|c| c == '-' || c.is_ascii_alphanumeric() || c == '_') {
            continue;
        }
        let rest: String = text[at + prefix.len()..]
            .chars()
            .take_while(|c| is_part(*c))
            .collect();
        let name = rest.trim_end_matches(['-', '_']);
        if !name.is_empty() {
            found.insert(format!("{prefix}{name}"));
        }
    }
    found
}

fn flags(text: &str) -> BTreeSet<String> {
    words(text, "--", |c| c.is_ascii_lowercase() || c == '-')
}

fn variables(text: &str) -> BTreeSet<String> {
    words(text, "KVGATE_", |c| c.is_ascii_uppercase() || c == '_')
}

fn output(mut command: Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap()
}

fn help(arguments: &[&str]) -> String {
    let output = output(command(&[arguments, &["--help"]].concat()));
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// A flag or a variable that is renamed must be renamed here, too.
#[test]
fn every_flag_and_variable_is_one_of_the_program() {
    let mut known_flags: BTreeSet<String> = BTreeSet::new();
    for arguments in [&["serve"][..], &["demo"], &["health"], &["store", "backup"]] {
        known_flags.extend(flags(&help(arguments)));
    }
    let known_variables: BTreeSet<String> = Layer::NAMES
        .iter()
        .map(|name| format!("KVGATE_{}", name.to_uppercase()))
        .collect();
    let (mut named_flags, mut named_variables) = (BTreeSet::new(), BTreeSet::new());
    let pages = [
        "docs/OPERATIONS.md",
        "docs/integrations/cluster.md",
        "docs/problems.md",
    ];
    let pages = pages.map(|page| root().join(page));
    for path in files().into_iter().chain(pages) {
        let text = std::fs::read_to_string(&path).unwrap();
        for flag in flags(&text) {
            assert!(
                known_flags.contains(&flag) || FLAGS_OF_OTHERS.contains(&flag.as_str()),
                "{}: there is no flag {flag}",
                path.display()
            );
            named_flags.insert(flag);
        }
        for variable in variables(&text) {
            assert!(
                known_variables.contains(&variable)
                    || VARIABLES_OF_OTHERS.contains(&variable.as_str()),
                "{}: there is no setting {variable}",
                path.display()
            );
            named_variables.insert(variable);
        }
    }
    for (list, named) in [
        (FLAGS_OF_OTHERS, &named_flags),
        (VARIABLES_OF_OTHERS, &named_variables),
    ] {
        let unused: Vec<_> = list.iter().filter(|word| !named.contains(**word)).collect();
        assert!(unused.is_empty(), "nothing names {unused:?}");
    }
    assert!(named_flags.len() > 15 && named_variables.len() > 8);
}

/// The files of settings are taken as they stand, and what is commented out in them exists.
#[test]
fn files_of_settings_are_taken() {
    for path in [
        "deploy/systemd/kvgate.toml",
        "deploy/kubernetes/kvgate.toml",
    ] {
        let config = Config::load(Layer::default(), [], Some(&root().join(path)))
            .unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(config.policy.program_admission && config.policy.session_lifecycle);
        for line in file(path).lines() {
            let Some((name, _)) = line
                .strip_prefix('#')
                .and_then(|line| line.split_once(" = "))
            else {
                continue;
            };
            assert!(Layer::NAMES.contains(&name), "{path}: {line}");
        }
    }
}

/// Exit codes of the README's table.
fn exit_codes() -> BTreeSet<u8> {
    let readme = file("README.md");
    let table = readme.split("## Exit codes").nth(1).unwrap();
    let codes: BTreeSet<u8> = table
        .lines()
        .take_while(|line| !line.starts_with("## "))
        .filter_map(|line| line.strip_prefix("| ")?.split(' ').next()?.parse().ok())
        .collect();
    assert!(codes.len() > 6, "{codes:?}");
    codes
}

/// The values of a key of the unit.
fn unit(key: &str) -> Vec<String> {
    let text = file("deploy/systemd/kvgate.service");
    let values = text.lines().filter_map(|line| {
        let (name, value) = line.split_once('=')?;
        (name.trim_start_matches('#') == key).then(|| value.to_owned())
    });
    values.collect()
}

#[test]
fn the_unit_restarts_what_passes_by_itself() {
    let prevented: BTreeSet<u8> = unit("RestartPreventExitStatus")[0]
        .split(' ')
        .map(|code| code.parse().unwrap())
        .collect();
    let retried: BTreeSet<u8> = RETRIED.iter().copied().collect();
    assert_eq!(
        exit_codes(),
        prevented.union(&retried).copied().collect::<BTreeSet<u8>>()
    );
    assert!(prevented.is_disjoint(&retried));
    let ray = file("deploy/ray/start_head.sh");
    let given_up: BTreeSet<u8> = ray
        .lines()
        .find_map(|line| line.trim().strip_suffix(") exit \"$status\" ;;"))
        .unwrap()
        .split(" | ")
        .map(|code| code.parse().unwrap())
        .collect();
    assert_eq!(given_up, prevented, "deploy/ray/start_head.sh");
    assert_eq!(unit("Type"), ["notify"]);
    assert_eq!(unit("StateDirectory"), ["kvgate"]);
    assert_eq!(unit("ProtectSystem"), ["strict"]);
    // The watchdog is slower than the service's own judgement of itself.
    let watchdog: u64 = unit("WatchdogSec")[0]
        .trim_end_matches('s')
        .parse()
        .unwrap();
    assert!(watchdog * 1_000 > kvgate::http::STUCK_AFTER.millis());
}

/// What the settings name of `LoadCredential` is loaded by the unit.
#[test]
fn credentials_agree() {
    let loaded: BTreeSet<String> = unit("LoadCredential")
        .iter()
        .map(|value| value.split(':').next().unwrap().to_owned())
        .collect();
    let settings = file("deploy/systemd/kvgate.toml");
    let place = "/run/credentials/kvgate.service/";
    let mut named = 0;
    for line in settings.lines().filter(|line| line.contains(place)) {
        let name = line.split(place).nth(1).unwrap().trim_end_matches('"');
        assert!(loaded.contains(name), "the unit does not load {name}");
        named += 1;
    }
    assert!(named > 2);
}

/// Everything meets at the port that the program listens on by itself.
#[test]
fn ports_agree() {
    let config = Config::load(Layer::default(), [], None).unwrap();
    let shown = config
        .shown
        .iter()
        .find(|shown| shown.name == "listen")
        .unwrap();
    let port = shown
        .value
        .split(':')
        .nth(1)
        .unwrap()
        .trim_end_matches("\"]");
    for (path, lines) in [
        (
            "deploy/systemd/kvgate.toml",
            &["listen = [\"127.0.0.1:{}\"]"][..],
        ),
        (
            "deploy/docker/Dockerfile",
            &["EXPOSE {}\n", "KVGATE_URL=http://127.0.0.1:{} "],
        ),
        ("deploy/docker/compose.yaml", &["--listen=127.0.0.1:{}\n"]),
        (
            "deploy/kubernetes/statefulset.yaml",
            &["containerPort: {}\n", "value: \"0.0.0.0:{}\""],
        ),
        ("deploy/kubernetes/service.yaml", &["port: {}\n"]),
        ("deploy/kubernetes/networkpolicy.yaml", &["port: {}\n"]),
        ("deploy/kubernetes/servicemonitor.yaml", &[".svc:{}\n"]),
        ("deploy/proxy/nginx.conf", &["server 127.0.0.1:{};"]),
        (
            "deploy/proxy/envoy.yaml",
            &["address: 127.0.0.1, port_value: {} }"],
        ),
        ("deploy/slurm/kvgate.sbatch", &["port=${GATE_PORT:-{}}"]),
        ("deploy/ray/start_head.sh", &["port=${GATE_PORT:-{}}"]),
        ("deploy/ray/runtime_env.yaml", &[":{}\""]),
    ] {
        let text = file(path);
        for line in lines {
            let line = line.replace("{}", port);
            assert!(text.contains(&line), "{path} lacks {line:?}");
        }
    }
    let mut found = 0;
    for path in files() {
        let text = std::fs::read_to_string(&path).unwrap();
        found += text.matches(port).count();
    }
    assert!(found > 15, "{port} stands {found} times");
}

/// The value of an instruction of the last stage, with lines that go on joined.
fn instructions() -> Vec<String> {
    let text = file("deploy/docker/Dockerfile");
    let joined: String = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| match line.strip_suffix('\\') {
            Some(begun) => begun.to_owned(),
            None => format!("{line}\n"),
        })
        .collect();
    joined
        .lines()
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect()
}

fn run_from_image(words: &[String], more: &[&str]) -> Output {
    let (program, arguments) = words.split_first().unwrap();
    assert_eq!(program, "/usr/local/bin/kvgate");
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    output(command(&[&arguments, more].concat()))
}

/// As far as a file tells without being built: bases have tags, the toolchain is the pinned one, the
/// user is nobody in particular, and what the image runs is a command of the program.
#[test]
fn the_image_is_as_it_should_be() {
    let instructions = instructions();
    let value = |name: &str| -> Vec<&str> {
        let values = instructions
            .iter()
            .filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        values.map(str::trim).collect()
    };
    let toolchain: toml::Table = file("rust-toolchain.toml").parse().unwrap();
    let channel = toolchain["toolchain"]["channel"].as_str().unwrap();
    for base in value("ARG") {
        if let Some((name, image)) = base.split_once("_BASE=") {
            let tag = image.rsplit_once(':').map(|(_, tag)| tag);
            assert!(tag.is_some_and(|tag| tag != "latest"), "{base}");
            if name == "BUILD" {
                assert!(image.starts_with(&format!("rust:{channel}-")), "{image}");
            }
        }
    }
    assert!(
        instructions
            .iter()
            .any(|line| line.contains(&format!("RUSTUP_TOOLCHAIN={channel}")))
    );
    let last = instructions
        .iter()
        .rposition(|line| line.starts_with("FROM "))
        .unwrap();
    let user = instructions[last..]
        .iter()
        .find_map(|line| line.strip_prefix("USER "))
        .unwrap();
    assert!(
        user.split(':').all(|id| id.parse::<u32>().unwrap() > 0),
        "{user}"
    );
    let statefulset = file("deploy/kubernetes/statefulset.yaml");
    let id = user.split(':').next().unwrap();
    for field in ["runAsUser", "runAsGroup", "fsGroup"] {
        assert!(
            statefulset.contains(&format!("{field}: {id}\n")),
            "{field} is not {id}"
        );
    }
    let list = |text: &str| -> Vec<String> { serde_json::from_str(text).unwrap() };
    let entry = list(value("ENTRYPOINT")[0]);
    let arguments = list(value("CMD")[0]);
    let shown = run_from_image(&[entry.clone(), arguments].concat(), &["--print-config"]);
    assert!(shown.status.success(), "{shown:?}");
    let check = value("HEALTHCHECK")[0].split_once("CMD ").unwrap().1;
    let asked = run_from_image(
        &list(check),
        &["--url", "http://127.0.0.1:1", "--timeout-s", "1"],
    );
    assert_eq!(asked.status.code(), Some(1), "{asked:?}");
    let said = String::from_utf8(asked.stderr).unwrap();
    assert!(said.contains("onnection refused"), "{said}");
}

/// The image is built from what the manifest needs.
#[test]
fn the_build_of_the_image_has_all_sources() {
    let ignored = file(".dockerignore");
    let kept: BTreeSet<&str> = ignored
        .lines()
        .filter_map(|line| line.strip_prefix('!'))
        .collect();
    let manifest: toml::Table = file("Cargo.toml").parse().unwrap();
    let members = manifest["workspace"]["members"].as_array().unwrap();
    let mut needed: Vec<&str> = members.iter().filter_map(toml::Value::as_str).collect();
    needed.extend([
        "Cargo.toml",
        "Cargo.lock",
        "rust-toolchain.toml",
        "src",
        "templates",
        "static",
        "migrations",
    ]);
    needed.extend(["benches", "tests"]);
    for path in needed {
        assert!(root().join(path).exists(), "{path}");
        assert!(
            kept.iter().any(|kept| Path::new(path).starts_with(kept)),
            "the image is built without {path}"
        );
    }
}

/// All documents of the manifests, as the kustomization lists them, and the examples beside it.
fn manifests() -> Vec<Value> {
    let folder = root().join("deploy/kubernetes");
    let list = &yaml(&folder.join("kustomization.yaml"))[0];
    let resources = list["resources"].as_array().unwrap();
    let named = resources.iter().map(|name| name.as_str().unwrap());
    named
        .chain(["servicemonitor.yaml", "secret.example.yaml"])
        .flat_map(|name| yaml(&folder.join(name)))
        .collect()
}

fn of_kind<'a>(manifests: &'a [Value], kind: &str) -> Vec<&'a Value> {
    let found: Vec<&Value> = manifests.iter().filter(|one| one["kind"] == kind).collect();
    assert!(!found.is_empty(), "no {kind}");
    found
}

#[test]
fn manifests_agree_with_each_other() {
    let manifests = manifests();
    let set = of_kind(&manifests, "StatefulSet")[0];
    assert_eq!(set["spec"]["replicas"], 1);
    let pod = &set["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let own = &set["spec"]["selector"]["matchLabels"];
    assert!(own.is_object());
    let services = of_kind(&manifests, "Service");
    assert!(services.iter().any(|service| {
        service["metadata"]["name"] == set["spec"]["serviceName"]
            && service["spec"]["clusterIP"] == "None"
    }));
    for service in services {
        assert_eq!(&service["spec"]["selector"], own);
        assert_eq!(
            service["spec"]["ports"][0]["targetPort"],
            container["ports"][0]["name"]
        );
    }
    let policy = of_kind(&manifests, "NetworkPolicy")[0];
    assert_eq!(&policy["spec"]["podSelector"]["matchLabels"], own);
    let monitor = of_kind(&manifests, "ServiceMonitor")[0];
    assert_eq!(&monitor["spec"]["selector"]["matchLabels"], own);
    assert_eq!(monitor["spec"]["endpoints"][0]["port"], "http");
    for (probe, path) in [
        ("startupProbe", "/readyz"),
        ("livenessProbe", "/healthz"),
        ("readinessProbe", "/readyz"),
    ] {
        let asked = &container[probe]["httpGet"];
        assert_eq!(asked["path"], path, "{probe}");
        // The pod's address is no allowed host.
        assert_eq!(asked["httpHeaders"][0]["value"], "localhost", "{probe}");
    }
    let security = &container["securityContext"];
    assert_eq!(security["readOnlyRootFilesystem"], true);
    assert_eq!(security["allowPrivilegeEscalation"], false);
    assert_eq!(security["capabilities"]["drop"][0], "ALL");
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    let names = |list: &Value, field: &str| -> BTreeSet<String> {
        let list = list.as_array().unwrap().iter();
        list.map(|one| one.pointer(field).unwrap().as_str().unwrap().to_owned())
            .collect()
    };
    let mut volumes = names(&pod["volumes"], "/name");
    volumes.extend(names(
        &set["spec"]["volumeClaimTemplates"],
        "/metadata/name",
    ));
    assert_eq!(names(&container["volumeMounts"], "/name"), volumes);
}

/// The pod's settings are taken: its file, its environment and its arguments together.
#[test]
fn the_settings_of_the_pod_are_taken() {
    let manifests = manifests();
    let container =
        &of_kind(&manifests, "StatefulSet")[0]["spec"]["template"]["spec"]["containers"][0];
    let arguments: Vec<&str> = container["args"]
        .as_array()
        .unwrap()
        .iter()
        .map(|word| word.as_str().unwrap())
        .map(|word| match word {
            "/etc/kvgate/kvgate.toml" => {
                concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/kubernetes/kvgate.toml")
            }
            word => word,
        })
        .collect();
    let mut run = command(&[&arguments[..], &["--print-config"]].concat());
    let mut set = 0;
    for variable in container["env"].as_array().unwrap() {
        let name = variable["name"].as_str().unwrap();
        if let Some(value) = variable["value"].as_str() {
            let value = value.replace("$(POD_NAMESPACE)", "rollout");
            assert!(!value.contains("$("), "{name}: {value}");
            run.env(name, value);
            set += usize::from(name.starts_with("KVGATE_"));
        }
    }
    let output = output(run);
    assert!(output.status.success(), "{output:?}");
    let shown = String::from_utf8(output.stdout).unwrap();
    let from_env = shown.lines().filter(|line| line.ends_with("# env")).count();
    assert_eq!(from_env, set, "{shown}");
    assert!(shown.contains("\"kvgate.rollout.svc\""), "{shown}");
}

/// YAML of other tools is read at least.
#[test]
fn files_of_other_tools_are_read() {
    let envoy = &yaml(&root().join("deploy/proxy/envoy.yaml"))[0];
    let manager = envoy
        .pointer("/static_resources/listeners/0/filter_chains/0/filters/0/typed_config")
        .unwrap();
    let clusters = &envoy["static_resources"]["clusters"];
    let routes = &manager["route_config"]["virtual_hosts"][0]["routes"];
    for route in routes.as_array().unwrap() {
        if let Some(cluster) = route["route"]["cluster"].as_str() {
            assert_eq!(clusters[0]["name"], cluster);
        }
    }
    // Above the longest wait of a call.
    for field in ["stream_idle_timeout", "request_timeout"] {
        let seconds: u64 = manager[field]
            .as_str()
            .unwrap()
            .trim_end_matches('s')
            .parse()
            .unwrap();
        assert!(seconds > 60, "{field}");
    }
    let nginx = file("deploy/proxy/nginx.conf");
    let read: u64 = nginx
        .split("proxy_read_timeout ")
        .nth(1)
        .and_then(|rest| rest.split('s').next()?.parse().ok())
        .unwrap();
    assert!(read > 60);
    let compose = &yaml(&root().join("deploy/docker/compose.yaml"))[0];
    let service = &compose["services"]["kvgate"];
    assert_eq!(service["read_only"], true);
    let arguments = service["command"].as_array().unwrap();
    let mut arguments: Vec<&str> = arguments
        .iter()
        .map(|word| word.as_str().unwrap())
        .collect();
    arguments.push("--print-config");
    assert!(output(command(&arguments)).status.success());
    let ray = &yaml(&root().join("deploy/ray/runtime_env.yaml"))[0];
    assert!(ray["env_vars"]["KVGATE_URL"].is_string());
}

/// A folder of programs that stand for those of a cluster.
fn stand_ins(programs: &[(&str, &str)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (name, script) in programs {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    }
    folder
}

/// A launch script of `deploy/` with stand-ins for the programs of a cluster.
fn script(path: &str, arguments: &[&str], stand_ins: &TempDir, work: &TempDir) -> Command {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let mut run = Command::new("bash");
    run.arg(root().join(path)).args(arguments);
    run.current_dir(work.path());
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("KVGATE_") || name.starts_with("GATE_") {
            run.env_remove(name);
        }
    }
    let path = std::env::var("PATH").unwrap_or_default();
    run.env("PATH", format!("{}:{path}", stand_ins.path().display()))
        .env("GATE_BIN", binary())
        .env("GATE_BIND", "127.0.0.1")
        .env("GATE_PORT", port.to_string())
        .env("GATE_DATA", work.path().join("data"));
    run
}

const HOSTNAME: (&str, &str) = ("hostname", "echo 127.0.0.1");

/// The job's gate is ready before the training starts, the training finds it, its exit status is the
/// job's, and the store is closed and copied at the end.
#[test]
fn a_slurm_job_has_its_gate() {
    let programs = stand_ins(&[HOSTNAME, ("srun", "exec \"$@\"")]);
    let work = TempDir::new().unwrap();
    let training = "\"$GATE_BIN\" health --ready --url \"$KVGATE_URL\" || exit 1; exit 7";
    let mut job = script(
        "deploy/slurm/kvgate.sbatch",
        &["sh", "-c", training],
        &programs,
        &work,
    );
    job.env("SLURM_JOB_ID", "4711")
        .env("GATE_KEEP", work.path());
    let output = output(job);
    let log = std::fs::read_to_string(work.path().join("kvgate-4711.log")).unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}\n{log}");
    assert!(log.contains("stopped"), "{log}");
    let copy = std::fs::read_to_string(work.path().join("kvgate-4711.ndjson")).unwrap();
    assert!(copy.starts_with("{\"header\""), "{copy}");
}

/// A gate that was killed is started again, on the same store.
#[test]
fn a_slurm_job_starts_a_killed_gate_again() {
    let work = TempDir::new().unwrap();
    let pid = work.path().join("pid");
    let gate = format!(
        "[ \"$1\" != serve ] || echo $$ > {}\nexec {} \"$@\"",
        pid.display(),
        binary().display()
    );
    let programs = stand_ins(&[HOSTNAME, ("srun", "exec \"$@\""), ("gate", &gate)]);
    let training = format!(
        "kill -KILL $(cat {}) || exit 2; for _ in 1 2 3 4 5 6 7 8 9 10; do \
         \"$GATE_BIN\" health --ready --url \"$KVGATE_URL\" && exit 7; sleep 1; done; exit 1",
        pid.display()
    );
    let training = training.as_str();
    let mut job = script(
        "deploy/slurm/kvgate.sbatch",
        &["sh", "-c", training],
        &programs,
        &work,
    );
    job.env("SLURM_JOB_ID", "4711")
        .env("GATE_BIN", programs.path().join("gate"));
    let output = output(job);
    let log = std::fs::read_to_string(work.path().join("kvgate-4711.log")).unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}\n{log}");
    assert!(log.contains("ended with 137; it is started again"), "{log}");
}

/// A gate that does not start is no reason not to train.
#[test]
fn a_slurm_job_goes_on_without_its_gate() {
    let programs = stand_ins(&[HOSTNAME, ("srun", "exec \"$@\"")]);
    let work = TempDir::new().unwrap();
    let mut job = script(
        "deploy/slurm/kvgate.sbatch",
        &["sh", "-c", "exit 7"],
        &programs,
        &work,
    );
    job.env("SLURM_JOB_ID", "4711")
        .env("GATE_ROUTER", "not a router");
    let output = output(job);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("goes on without it"), "{said}");
}

/// How the store that a script served was left.
fn last_stop(work: &TempDir) -> String {
    let data = work.path().join("data");
    let look = output(command(&[
        "store",
        "inspect",
        "--data",
        data.to_str().unwrap(),
    ]));
    let look = String::from_utf8(look.stdout).unwrap();
    let line = look.lines().find(|line| line.starts_with("last stop"));
    line.unwrap().split_whitespace().last().unwrap().to_owned()
}

/// A job whose time is over tells its training, and closes the store in order.
#[test]
fn a_slurm_job_ends_in_order() {
    let work = TempDir::new().unwrap();
    let programs = stand_ins(&[HOSTNAME, ("srun", "exec \"$@\"")]);
    let training =
        "sleep 60 & trap 'kill $!; echo told > told; exit 1' TERM; kill -TERM $PPID; wait";
    let mut job = script(
        "deploy/slurm/kvgate.sbatch",
        &["sh", "-c", training],
        &programs,
        &work,
    );
    job.env("SLURM_JOB_ID", "4711");
    let output = output(job);
    assert_eq!(output.status.code(), Some(143), "{output:?}");
    assert!(work.path().join("told").exists(), "{output:?}");
    assert_eq!(last_stop(&work), "orderly");
}

/// SIGTERM stops the gate in order, and Ray after it.
#[test]
fn a_head_node_ends_in_order() {
    let work = TempDir::new().unwrap();
    let note = format!("echo \"$@\" >> {}", work.path().join("ray").display());
    // Tells the script to stop as soon as its gate is ready.
    let gate = format!(
        "if [ \"$1\" = serve ]; then\n\
         ( until {program} health --ready --url \"http://127.0.0.1:$GATE_PORT\"; do sleep 0.1; done; kill -TERM $PPID ) &\n\
         fi\nexec {program} \"$@\"",
        program = binary().display()
    );
    let programs = stand_ins(&[HOSTNAME, ("ray", &note), ("gate", &gate)]);
    let mut head = script("deploy/ray/start_head.sh", &[], &programs, &work);
    head.env("GATE_BIN", programs.path().join("gate"));
    let output = output(head);
    assert_eq!(output.status.code(), Some(143), "{output:?}");
    let ray = std::fs::read_to_string(work.path().join("ray")).unwrap();
    assert_eq!(ray, "start --head\nstop\n");
    assert_eq!(last_stop(&work), "orderly");
}

/// What a repeated start cannot mend ends the script of the head node, and Ray with it.
#[test]
fn a_head_node_gives_up_on_a_wrong_setting() {
    let work = TempDir::new().unwrap();
    let note = format!("echo \"$@\" >> {}", work.path().join("ray").display());
    let programs = stand_ins(&[HOSTNAME, ("ray", &note)]);
    let mut head = script(
        "deploy/ray/start_head.sh",
        &["--num-cpus=1"],
        &programs,
        &work,
    );
    head.env("GATE_ROUTER", "not a router");
    let output = output(head);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let ray = std::fs::read_to_string(work.path().join("ray")).unwrap();
    assert_eq!(ray, "start --head --num-cpus=1\nstop\n");
}

/// The manual page has every flag and every command of `--help`.
#[test]
fn the_manual_page_is_complete() {
    let page = output(command(&["man"]));
    assert!(page.status.success());
    let page = String::from_utf8(page.stdout).unwrap().replace("\\-", "-");
    let is_alias = |flag: &String| flag.starts_with("--agentic-");
    for flag in flags(&help(&["serve"]))
        .iter()
        .filter(|flag| !is_alias(flag))
    {
        assert!(page.contains(flag), "the page lacks {flag}");
    }
    let commands = help(&[]);
    let listed = commands.split("Commands:").nth(1).unwrap();
    let names = listed
        .lines()
        .filter_map(|line| line.strip_prefix("  ")?.split(' ').next())
        .filter(|name| !name.is_empty() && *name != "help");
    let mut count = 0;
    for name in names.take_while(|name| !name.starts_with('-')) {
        let heading = format!("kvgate-{name}").to_uppercase();
        let spaced = heading.replacen('-', " ", 1);
        assert!(
            page.contains(&heading) || page.contains(&spaced),
            "no {name}:\n{page}"
        );
        count += 1;
    }
    assert!(count > 5, "{count} commands");
    for code in exit_codes() {
        assert!(
            page.contains(&format!("\\fB{code}\\fR")),
            "no exit code {code}"
        );
    }
}
