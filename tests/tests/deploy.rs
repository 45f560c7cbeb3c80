//! What `deploy/` says is what the programs understand.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use marathon_tests::{Program, command, repository_root};
use serde_json::Value;
use tempfile::TempDir;

fn deploy() -> PathBuf {
    repository_root().join("deploy")
}

fn read(path: &str) -> String {
    fs::read_to_string(deploy().join(path)).unwrap()
}

/// The long flags in a program's help for a subcommand.
fn flags(program: &str, subcommand: &str) -> BTreeSet<String> {
    let help = Program::run(command(program).args([subcommand, "--help"]));
    assert_eq!(
        help.code,
        Some(0),
        "{program} {subcommand} --help: {}",
        help.stderr
    );
    let words = help
        .stdout
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
    words
        .filter(|word| word.starts_with("--"))
        .map(str::to_owned)
        .collect()
}

/// Asserts that a command line as `deploy/` has it names a program, a subcommand and flags that
/// exist.
fn assert_understood(place: &str, words: &[&str]) {
    let [program, subcommand, rest @ ..] = words else {
        panic!("{place}: `{words:?}` is too short")
    };
    let program = program.rsplit('/').next().unwrap();
    assert!(
        ["brain", "pilot"].contains(&program),
        "{place}: unknown program {program}"
    );
    let known = flags(program, subcommand);
    for word in rest.iter().filter(|word| word.starts_with("--")) {
        let flag = word.split('=').next().unwrap();
        assert!(
            known.contains(flag),
            "{place}: {program} {subcommand} has no {flag}"
        );
    }
}

#[test]
fn units_start_programs_with_flags_that_exist() {
    for unit in ["systemd/brain.service", "systemd/pilot@.service"] {
        let text = read(unit);
        let start = text
            .lines()
            .find_map(|line| line.strip_prefix("ExecStart="))
            .unwrap();
        assert_understood(unit, &start.split_whitespace().collect::<Vec<_>>());
    }
}

/// systemd's own check of the units, with stand-ins where the programs would be installed.
#[test]
fn systemd_has_nothing_to_say_about_the_units() {
    if Command::new("systemd-analyze")
        .arg("--version")
        .output()
        .is_err()
    {
        eprintln!("SKIPPED: systemd-analyze is not installed");
        return;
    }
    let dir = TempDir::new().unwrap();
    for (unit, user) in [("brain.service", "--system"), ("pilot@.service", "--user")] {
        let program = dir.path().join("program");
        fs::write(&program, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        // The user and the program need not exist here; everything else stays as it is.
        let text: String = read(&format!("systemd/{unit}"))
            .lines()
            .filter(|line| !line.starts_with("User=") && !line.starts_with("Group="))
            .map(|line| match line.strip_prefix("ExecStart=") {
                Some(start) => {
                    let arguments = start.split_once(' ').unwrap().1;
                    format!("ExecStart={} {arguments}\n", program.display())
                }
                None => format!("{line}\n"),
            })
            .collect();
        let path = dir.path().join(unit.replace('@', "@example"));
        fs::write(&path, text).unwrap();
        let checked = Command::new("systemd-analyze")
            .args(["verify", "--man=no", user])
            .arg(&path)
            .env("XDG_RUNTIME_DIR", dir.path())
            .output()
            .unwrap();
        // A misspelt key is a line on stderr, not a status. Lines about other units of this
        // machine are not ours.
        let said = String::from_utf8_lossy(&checked.stderr);
        let ours: Vec<_> = said
            .lines()
            .filter(|line| line.contains(dir.path().to_str().unwrap()))
            .collect();
        assert!(
            ours.is_empty() && checked.status.success(),
            "{unit}: {said}"
        );
    }
}

#[test]
fn the_brain_unit_is_locked_down() {
    let unit = read("systemd/brain.service");
    for line in [
        "Type=notify",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "ProtectSystem=strict",
        "ProtectHome=yes",
        "DevicePolicy=closed",
        "UMask=0077",
        "LimitCORE=0",
        "Restart=on-failure",
    ] {
        assert!(
            unit.lines().any(|have| have == line),
            "brain.service lacks {line}"
        );
    }
}

#[test]
fn sample_settings_are_settings() {
    for (program, subcommand, file) in [
        ("brain", "serve", "config/brain.toml"),
        ("pilot", "run", "config/pilot.toml"),
    ] {
        let path = deploy().join(file);
        let printed = Program::run(
            command(program)
                .args([subcommand, "--print-config", "--config"])
                .arg(&path),
        );
        assert_eq!(printed.code, Some(0), "{file}: {}", printed.stderr);
        // What the file sets, the program says it took from the file.
        let values: Vec<_> = read(file)
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| Some(line.split_once(" = ")?.0.to_owned()))
            .collect();
        assert!(!values.is_empty());
        for name in values {
            let line = printed
                .stdout
                .lines()
                .find(|line| line.starts_with(&format!("{name} ")));
            let line =
                line.unwrap_or_else(|| panic!("{file}: {name} is not in\n{}", printed.stdout));
            assert!(
                line.contains("toml"),
                "{file}: {name} came from elsewhere: {line}"
            );
        }
        // And what it only mentions exists too.
        let uncommented: String = read(file)
            .lines()
            .map(|line| match line.strip_prefix("# ") {
                Some(setting) if setting.contains(" = ") && !setting.contains(": ") => setting,
                _ => line,
            })
            .fold(String::new(), |text, line| text + line + "\n");
        let dir = TempDir::new().unwrap();
        let all = dir.path().join("all.toml");
        fs::write(&all, uncommented).unwrap();
        let printed = Program::run(
            command(program)
                .args([subcommand, "--print-config", "--config"])
                .arg(&all),
        );
        assert_eq!(
            printed.code,
            Some(0),
            "{file}, all of it: {}",
            printed.stderr
        );
    }
}

/// The documents of a YAML file.
fn documents(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.split("\n---\n")
        .map(|document| {
            serde_saphyr::from_str(document)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        })
        .collect()
}

/// Every object of the base, as kustomize lists them.
fn base() -> Vec<Value> {
    let base = deploy().join("kubernetes/base");
    let [kustomization] = &documents(&base.join("kustomization.yaml"))[..] else {
        panic!()
    };
    let resources = kustomization["resources"].as_array().unwrap();
    let listed: BTreeSet<_> = resources
        .iter()
        .map(|name| name.as_str().unwrap().to_owned())
        .collect();
    let there: BTreeSet<_> = fs::read_dir(&base)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "kustomization.yaml")
        .collect();
    assert_eq!(listed, there, "kustomization.yaml lists what is there");
    listed
        .iter()
        .flat_map(|name| documents(&base.join(name)))
        .collect()
}

fn of_kind<'v>(objects: &'v [Value], kind: &str) -> Vec<&'v Value> {
    objects
        .iter()
        .filter(|object| object["kind"] == kind)
        .collect()
}

/// What has pods.
fn workloads(objects: &[Value]) -> Vec<&Value> {
    [of_kind(objects, "StatefulSet"), of_kind(objects, "Job")].concat()
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap()
}

#[test]
fn kustomize_renders_the_base() {
    if Command::new("kubectl")
        .arg("version")
        .arg("--client")
        .output()
        .is_err()
    {
        eprintln!("SKIPPED: kubectl is not installed");
        return;
    }
    let rendered = Command::new("kubectl")
        .arg("kustomize")
        .arg(deploy().join("kubernetes/base"))
        .output()
        .unwrap();
    assert!(
        rendered.status.success(),
        "{}",
        String::from_utf8_lossy(&rendered.stderr)
    );
    let text = String::from_utf8(rendered.stdout).unwrap();
    assert_eq!(text.matches("\nkind: ").count(), base().len(), "{text}");
    assert!(text.contains("image: marathon:"), "the image has a tag");
}

#[test]
fn pods_run_commands_that_exist() {
    let objects = base();
    for set in workloads(&objects) {
        for container in set["spec"]["template"]["spec"]["containers"]
            .as_array()
            .unwrap()
        {
            let words: Vec<_> = container["args"]
                .as_array()
                .unwrap()
                .iter()
                .map(|word| word.as_str().unwrap())
                .collect();
            assert_understood(name(set), &words);
        }
    }
    let image = read("container/Containerfile");
    let start = image
        .lines()
        .find_map(|line| line.strip_prefix("CMD "))
        .unwrap();
    let words: Vec<String> = serde_json::from_str(start).unwrap();
    assert_understood(
        "Containerfile",
        &words.iter().map(String::as_str).collect::<Vec<_>>(),
    );
}

#[test]
fn pods_have_no_rights_that_they_do_not_need() {
    let objects = base();
    let sets = workloads(&objects);
    assert_eq!(sets.len(), 2, "a brain and a pilot");
    for set in sets {
        let place = name(set);
        let pod = &set["spec"]["template"]["spec"];
        assert_eq!(pod["automountServiceAccountToken"], false, "{place}");
        assert_eq!(
            pod["enableServiceLinks"], false,
            "{place}: they would look like settings"
        );
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true, "{place}");
        assert_eq!(
            pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault",
            "{place}"
        );
        for container in pod["containers"].as_array().unwrap() {
            let context = &container["securityContext"];
            assert_eq!(context["allowPrivilegeEscalation"], false, "{place}");
            assert_eq!(context["readOnlyRootFilesystem"], true, "{place}");
            assert_eq!(
                context["capabilities"]["drop"],
                serde_json::json!(["ALL"]),
                "{place}"
            );
            assert!(
                container["resources"]["limits"]["memory"].is_string(),
                "{place}"
            );
            let volumes: BTreeSet<_> = [&pod["volumes"], &set["spec"]["volumeClaimTemplates"]]
                .iter()
                .flat_map(|list| list.as_array().into_iter().flatten())
                .filter_map(|volume| {
                    volume["name"]
                        .as_str()
                        .or(volume["metadata"]["name"].as_str())
                })
                .collect();
            for mount in container["volumeMounts"].as_array().unwrap() {
                let volume = mount["name"].as_str().unwrap();
                assert!(volumes.contains(volume), "{place}: no volume {volume}");
            }
        }
        let labels = &set["spec"]["template"]["metadata"]["labels"];
        if set["kind"] == "StatefulSet" {
            assert_eq!(set["spec"]["replicas"], 1, "{place}: one device");
            assert_eq!(&set["spec"]["selector"]["matchLabels"], labels, "{place}");
        }
        let guarded = of_kind(&objects, "NetworkPolicy")
            .iter()
            .any(|policy| &policy["spec"]["podSelector"]["matchLabels"] == labels);
        assert!(guarded, "{place}: no network policy selects it");
    }
}

#[test]
fn the_brain_pod_is_probed_and_given_time() {
    let objects = base();
    let sets = of_kind(&objects, "StatefulSet");
    let brain = sets
        .iter()
        .find(|set| name(set) == "marathon-brain")
        .unwrap();
    let pod = &brain["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
        assert_eq!(container[probe]["grpc"]["port"], 7411, "{probe}");
    }
    let grace = pod["terminationGracePeriodSeconds"].as_u64().unwrap();
    let before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        .as_u64()
        .unwrap();
    assert!(
        grace >= before + 40,
        "{grace} s are too few for preStop, drain and exit"
    );
    let services = of_kind(&objects, "Service");
    for service in services {
        assert_ne!(name(service), "brain", "it would set BRAIN_PORT");
        assert_eq!(
            service["spec"]["selector"],
            brain["spec"]["template"]["metadata"]["labels"],
            "{}",
            name(service)
        );
    }
}

#[test]
fn nothing_listens_beyond_this_machine_without_a_token() {
    for file in [
        "config/brain.toml",
        "config/pilot.toml",
        "systemd/brain.service",
    ] {
        let text = read(file);
        assert!(
            !text.contains("0.0.0.0") && !text.contains("[::]"),
            "{file}"
        );
    }
    let pods = read("kubernetes/base/brain.yaml");
    assert!(pods.contains("--grpc-addr=0.0.0.0") && pods.contains("--token-file="));
}
