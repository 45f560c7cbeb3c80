//! Bad input: one clear line that says what and what to do, a distinct exit status, and nothing
//! changed on disk.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use marathon_tests::{
    Brain, BrainOptions, Program, command, repository_root,
    scripted::{Script, ScriptedBrain, ScriptedOptions},
    snapshot,
};
use tempfile::TempDir;

/// Runs a command that must be refused. Its message is one line with every one of `says`, its
/// status is returned.
fn refused(case: &str, dir: &Path, command: &mut Command, says: &[&str]) -> i32 {
    let before = snapshot(dir);
    let end = Program::run(command);
    let code = end
        .code
        .unwrap_or_else(|| panic!("{case}: died of a signal: {}", end.stderr));
    assert_ne!(code, 0, "{case}: was accepted: {}", end.stdout);
    assert_ne!(code, 101, "{case}: panicked: {}", end.stderr);
    // What a program logs on its way (with a time first) is not its message.
    let lines: Vec<_> = end
        .stderr
        .lines()
        .filter(|line| !line.starts_with(|c: char| c.is_ascii_digit()))
        .collect();
    assert_eq!(lines.len(), 1, "{case}: not one line:\n{}", end.stderr);
    for word in says {
        assert!(
            lines[0].contains(word),
            "{case}: `{}` does not say `{word}`",
            lines[0]
        );
    }
    assert!(end.stdout.is_empty(), "{case}: printed {}", end.stdout);
    assert_eq!(snapshot(dir), before, "{case}: something on disk changed");
    code
}

fn serve(model: &Path) -> Command {
    let mut command = command("brain");
    command
        .args([
            "serve",
            "--device",
            "cpu",
            "--grpc-addr",
            "127.0.0.1:0",
            "--model",
        ])
        .arg(model);
    command
}

/// A copy of the demo checkpoint to damage.
fn checkpoint(dir: &TempDir) -> std::path::PathBuf {
    let copy = dir.path().join("model");
    copy_tree(&repository_root().join("brain/assets/demo"), &copy);
    copy
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn brain_refuses_a_checkpoint_that_is_none() {
    let dir = TempDir::new().unwrap();
    let model = checkpoint(&dir);
    let weights = fs::read(model.join("model.safetensors")).unwrap();
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    let tokenizer = fs::read_to_string(model.join("tokenizer.json")).unwrap();
    let damage = |name: &str, bytes: &[u8]| fs::write(model.join(name), bytes).unwrap();
    let mut codes = BTreeMap::new();

    let absent = dir.path().join("absent");
    codes.insert(
        "missing",
        refused("missing", dir.path(), &mut serve(&absent), &["absent"]),
    );

    let cut = [0, 7, 8, 100, weights.len() / 2, weights.len() - 1];
    for keep in cut {
        damage("model.safetensors", &weights[..keep]);
        let case = format!("weights cut to {keep} bytes");
        codes.insert(
            "truncated",
            refused(
                &case,
                dir.path(),
                &mut serve(&model),
                &["model.safetensors"],
            ),
        );
    }
    let mut huge = weights.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    damage("model.safetensors", &huge);
    refused(
        "header length beyond the file",
        dir.path(),
        &mut serve(&model),
        &["model.safetensors"],
    );
    damage("model.safetensors", &weights);

    damage("config.json", b"{");
    codes.insert(
        "damaged",
        refused(
            "config cut",
            dir.path(),
            &mut serve(&model),
            &["config.json"],
        ),
    );
    damage("config.json", config.replace("gemma4", "llama9").as_bytes());
    let code = refused("architecture", dir.path(), &mut serve(&model), &["llama9"]);
    codes.insert("architecture", code);
    // It has no tokenizer either, which is not what is wrong.
    let assistant = model.join("assistant");
    let says = ["MTP assistant", "--drafter"];
    let code = refused("an assistant", dir.path(), &mut serve(&assistant), &says);
    codes.insert("assistant", code);
    damage("config.json", config.as_bytes());

    damage(
        "tokenizer.json",
        tokenizer.replacen("\"▁\"", "\"▁▁▁▁unknown\"", 1).as_bytes(),
    );
    let end = Program::run(serve(&model).arg("--print-config"));
    assert_eq!(
        end.code,
        Some(0),
        "print-config reads no checkpoint: {}",
        end.stderr
    );
    damage("tokenizer.json", b"{}");
    codes.insert(
        "tokenizer",
        refused("tokenizer", dir.path(), &mut serve(&model), &["tokenizer"]),
    );

    assert!(
        codes.values().all(|code| *code == codes["missing"]),
        "one status: {codes:?}"
    );
}

#[test]
fn brain_refuses_settings_that_cannot_be() {
    let dir = TempDir::new().unwrap();
    let fake = |flags: &[&str]| {
        let mut command = command("brain");
        command.args(["serve", "--device", "fake"]).args(flags);
        command
    };
    let wrong = dir.path().join("wrong.toml");
    fs::write(&wrong, "no_such_setting = 1\n").unwrap();
    let open = dir.path().join("token");
    fs::write(&open, "0123456789abcdef0123\n").unwrap();
    let code = refused(
        "open address",
        dir.path(),
        &mut fake(&["--grpc-addr", "0.0.0.0:0"]),
        &["0.0.0.0:0", "token"],
    );
    assert_eq!(code, 4);
    let mut abacus = command("brain");
    abacus.args(["serve", "--device", "abacus"]);
    let code = refused("device", dir.path(), &mut abacus, &["abacus"]);
    assert_eq!(code, 2);
    let mut codes = Vec::new();
    for (case, flags, says) in [
        (
            "no address",
            vec!["--grpc-addr", "nowhere"],
            vec!["nowhere"],
        ),
        (
            "unknown setting",
            vec!["--config", wrong.to_str().unwrap()],
            vec!["no_such_setting"],
        ),
        (
            "missing config",
            vec!["--config", "/nowhere.toml"],
            vec!["/nowhere.toml"],
        ),
        (
            "token open to all",
            vec!["--token-file", open.to_str().unwrap()],
            vec!["chmod"],
        ),
        (
            "missing token",
            vec!["--token-file", "/nowhere"],
            vec!["/nowhere"],
        ),
        ("log format", vec!["--log-format", "xml"], vec!["xml"]),
    ] {
        let code = refused(case, dir.path(), &mut fake(&flags), &says);
        codes.push((case, code));
    }
    assert!(codes.iter().all(|(_, code)| *code == 2), "{codes:?}");
}

#[test]
fn brain_says_that_its_port_is_taken() {
    let dir = TempDir::new().unwrap();
    let first = Brain::start(BrainOptions::fake(&[]));
    let mut second = command("brain");
    second.args(["serve", "--device", "fake", "--grpc-addr", &first.addr]);
    let code = refused(
        "port taken",
        dir.path(),
        &mut second,
        &[&first.addr, "in use"],
    );
    assert_eq!(code, 4);
}

struct Pilot {
    dir: TempDir,
}

impl Pilot {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = command("pilot");
        command.env("HOME", self.dir.path()).args(arguments);
        command.arg("--store").arg(self.dir.path().join("store"));
        command
    }
}

#[test]
fn pilot_refuses_what_cannot_be() {
    let pilot = Pilot {
        dir: TempDir::new().unwrap(),
    };
    let dir = pilot.dir.path();
    let workspace = dir.join("workspace");
    fs::create_dir(&workspace).unwrap();
    let workspace = workspace.to_str().unwrap();
    let file = dir.join("file");
    fs::write(&file, "x").unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = free.local_addr().unwrap().to_string();
    drop(free);

    let run = |arguments: &[&str]| {
        let mut all = vec!["run", "goal"];
        all.extend(arguments);
        pilot.command(&all)
    };
    let absent = dir.join("absent");
    let absent = absent.to_str().unwrap();
    let code = refused(
        "workspace missing",
        dir,
        &mut run(&["--workspace", absent]),
        &[absent],
    );
    assert_eq!(code, 7);
    let code = refused(
        "workspace is a file",
        dir,
        &mut run(&["--workspace", file.to_str().unwrap()]),
        &[file.to_str().unwrap()],
    );
    assert_eq!(code, 7);
    let code = refused(
        "brain unreachable",
        dir,
        &mut run(&["--workspace", workspace, "--brain", &nobody]),
        &[&nobody],
    );
    assert_eq!(code, 3);
    let code = refused(
        "no address",
        dir,
        &mut run(&["--workspace", workspace, "--brain", "ftp://x"]),
        &["ftp://x"],
    );
    assert_eq!(code, 2);
    for subcommand in ["resume", "show"] {
        let case = format!("{subcommand} without a store");
        let mut command = pilot.command(&[subcommand, "no-such-run"]);
        assert_eq!(
            refused(&case, dir, &mut command, &["store", "pilot run"]),
            6
        );
    }
}

#[test]
fn pilot_says_that_a_run_is_unknown() {
    let pilot = Pilot {
        dir: TempDir::new().unwrap(),
    };
    let workspace = pilot.dir.path().join("workspace");
    fs::create_dir(&workspace).unwrap();
    let brain = ScriptedBrain::start(Script::default(), ScriptedOptions::default()).unwrap();
    let mut run = pilot.command(&["run", "goal", "--run", "there", "--brain", &brain.address()]);
    let end = Program::run(run.arg("--workspace").arg(&workspace));
    assert_eq!(end.code, Some(0), "{}", end.stderr);
    for name in ["no-such-run", "No Such Run", "../there"] {
        for subcommand in ["resume", "show"] {
            let case = format!("{subcommand} of an unknown run");
            let mut command = pilot.command(&[subcommand, name]);
            // Opening a store writes to its own files; the runs in it stay as they are.
            let refused = Program::run(&mut command);
            assert_eq!(refused.code, Some(6), "{case}: {}", refused.stderr);
            assert_eq!(
                refused.stderr.lines().count(),
                1,
                "{case}: {}",
                refused.stderr
            );
            assert!(refused.stderr.contains(name), "{case}: {}", refused.stderr);
        }
    }
    let again = pilot
        .command(&["run", "goal", "--run", "there", "--brain", &brain.address()])
        .arg("--workspace")
        .arg(&workspace)
        .output()
        .unwrap();
    assert_eq!(
        again.status.code(),
        Some(2),
        "a name is used once: {again:?}"
    );
}

#[test]
fn usage_errors_name_the_flag_and_leave_with_2() {
    for (program, arguments) in [
        ("brain", ["serve", "--no-such-flag"]),
        ("pilot", ["run", "--no-such-flag"]),
    ] {
        let end = Program::run(command(program).args(arguments));
        assert_eq!(end.code, Some(2), "{program}");
        assert!(
            end.stderr.contains("--no-such-flag"),
            "{program}: {}",
            end.stderr
        );
    }
}

#[test]
fn help_lists_the_exit_statuses() {
    for (program, subcommand) in [("brain", "serve"), ("pilot", "run")] {
        let top = Program::run(command(program).arg("--help"));
        let sub = Program::run(command(program).args([subcommand, "--help"]));
        let text = format!("{}{}", top.stdout, sub.stdout).to_lowercase();
        assert!(
            text.contains("exit status") || text.contains("exit code"),
            "{program}:\n{text}"
        );
    }
}
