//! Rules of the repository itself: what no compiler checks and a reviewer would have to.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::{fs, path::PathBuf, process::Command};

const MAX_LINES: usize = 700;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .canonicalize()
        .unwrap()
}

/// A tracked text file, by its path from the root.
struct File {
    path: String,
    text: String,
}

fn tracked() -> Vec<File> {
    let listed = Command::new("git")
        .args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .current_dir(root())
        .output()
        .expect("git lists the files");
    assert!(
        listed.status.success(),
        "git ls-files: {}",
        String::from_utf8_lossy(&listed.stderr)
    );
    let files: Vec<File> = String::from_utf8(listed.stdout)
        .unwrap()
        .split_terminator('\0')
        .filter_map(|path| {
            // Deleted but not committed, or not text.
            let text = fs::read_to_string(root().join(path)).ok()?;
            Some(File {
                path: path.to_owned(),
                text,
            })
        })
        .collect();
    assert!(
        files
            .iter()
            .any(|file| file.path == "tests/tests/repository.rs"),
        "nothing listed"
    );
    files
}

fn is_code(path: &str) -> bool {
    let extension = path.rsplit_once('.').map_or("", |(_, extension)| extension);
    matches!(
        extension,
        "rs" | "py" | "sh" | "cu" | "cuh" | "proto" | "c" | "h"
    ) || matches!(path, "tests/run" | ".ci/run")
        || ["tests/long/", "tests/clients/"]
            .iter()
            .any(|folder| path.starts_with(folder))
}

/// Every line of `files` that `wrong` finds something in, as `path:line: what`.
fn findings<'f>(
    files: impl IntoIterator<Item = &'f File>,
    wrong: impl Fn(&str) -> Option<String>,
) -> Vec<String> {
    files
        .into_iter()
        .flat_map(|file| {
            let wrong = &wrong;
            file.text
                .lines()
                .enumerate()
                .filter_map(move |(number, line)| {
                    wrong(line).map(|what| format!("{}:{}: {what}", file.path, number + 1))
                })
        })
        .collect()
}

fn assert_none(findings: Vec<String>, rule: &str) {
    assert!(findings.is_empty(), "{rule}\n{}", findings.join("\n"));
}

#[test]
fn a_file_of_code_is_one_idea() {
    let long: Vec<_> = tracked()
        .iter()
        .filter(|file| is_code(&file.path))
        .map(|file| (file.text.lines().count(), &file.path))
        .filter(|(lines, _)| *lines > MAX_LINES)
        .map(|(lines, path)| format!("{path}: {lines} lines"))
        .collect();
    assert_none(long, "split these files:");
}

/// What a pure core may not name. `Duration` is a value and allowed.
const IMPURE: &[&str] = &[
    "std::fs",
    "std::io",
    "std::net",
    "std::thread",
    "std::process",
    "std::env",
    "Instant",
    "SystemTime",
    "tokio",
    "tonic",
    "sled::",
    "rustix",
    "rand::rng",
    "thread_rng",
    "println!",
    "eprintln!",
];

#[test]
fn the_two_cores_are_pure() {
    let files = tracked();
    let cores = files.iter().filter(|file| {
        file.path.starts_with("brain/src/sched/") || file.path.starts_with("pilot/src/run/")
    });
    let mut seen = 0;
    let mut impure = Vec::new();
    for file in cores {
        seen += 1;
        // Tests of a core may use what they like.
        let code = file.text.split("#[cfg(test)]").next().unwrap_or_default();
        let code: String = code
            .lines()
            .flat_map(|line| [without_comment(line), "\n"])
            .collect();
        let named = code.lines().map(str::to_owned).chain(imports(&code));
        for text in named {
            for word in IMPURE.iter().filter(|word| has_word(&text, word)) {
                impure.push(format!("{}: {word} in `{}`", file.path, text.trim()));
            }
        }
    }
    assert!(seen > 0, "the cores have moved: correct this test");
    assert_none(
        impure,
        "a pure core holds no socket, clock, thread, file or device:",
    );
}

fn without_comment(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

/// Every path that the `use` items of `code` name, with groups written out.
fn imports(code: &str) -> Vec<String> {
    let mut paths = Vec::new();
    for item in code.split(';') {
        let begins = item.rfind("use ").filter(|at| {
            let before = item[..*at].rsplit('\n').next().unwrap_or_default().trim();
            before.is_empty() || before.starts_with("pub")
        });
        if let Some(at) = begins {
            write_out("", &item[at + 4..], &mut paths);
        }
    }
    paths
}

/// Adds the paths of one tree of a `use` item, each behind `prefix`.
fn write_out(prefix: &str, tree: &str, paths: &mut Vec<String>) {
    let tree = tree.trim();
    let Some((head, group)) = tree.split_once('{') else {
        if !tree.is_empty() {
            paths.push(format!("{prefix}{tree}"));
        }
        return;
    };
    let prefix = format!("{prefix}{}", head.trim());
    let group = group.strip_suffix('}').unwrap_or(group);
    let mut depth = 0;
    let parts = group.split(|c| {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    });
    parts.for_each(|part| write_out(&prefix, part, paths));
}

#[test]
fn imports_in_groups_are_seen() {
    let code = "use std::{collections::{BTreeMap, VecDeque}, fs};\n\
                pub use a::b;\n    use std::{\n    io::{self, Read as _},\n    time,\n};\nfn f() {}\n";
    assert_eq!(
        imports(code),
        [
            "std::collections::BTreeMap",
            "std::collections::VecDeque",
            "std::fs",
            "a::b",
            "std::io::self",
            "std::io::Read as _",
            "std::time"
        ]
    );
    let impure = imports(code);
    let found = IMPURE
        .iter()
        .filter(|word| impure.iter().any(|path| has_word(path, word)));
    assert_eq!(found.collect::<Vec<_>>(), [&"std::fs", &"std::io"]);
}

/// Whether `word` stands in `code` with no letter or digit before or after it.
fn has_word(code: &str, word: &str) -> bool {
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    code.match_indices(word).any(|(at, _)| {
        !is_part(code[..at].chars().next_back()) && !is_part(code[at + word.len()..].chars().next())
    })
}

/// Split in two so that this file does not hold what it looks for.
const FORBIDDEN: &[(&str, &str, &str)] = &[
    ("/wo", "rk/", "a path of one machine"),
    ("/ho", "me/", "a path of one machine"),
    ("/ro", "ot/", "a path of one machine"),
    ("../sha", "red", "a folder outside the repository"),
    ("TO", "DO", "unfinished"),
    ("FIX", "ME", "unfinished"),
    ("todo", "!(", "unfinished"),
    ("unimplemented", "!(", "unfinished"),
    ("crates", ".io/api", "a registry's host"),
    ("index.crates", ".io", "a registry's host"),
    ("pypi", ".org", "a registry's host"),
    ("deb.debian", ".org", "a registry's host"),
    ("<<<<", "<<<", "a merge left open"),
];

#[test]
fn no_file_speaks_of_a_machine_or_of_unfinished_work() {
    let files = tracked();
    let ours = files.iter().filter(|file| {
        !matches!(file.path.as_str(), "Cargo.lock" | "LICENSE") && !file.path.ends_with(".json")
    });
    let found = findings(ours, |line| {
        FORBIDDEN
            .iter()
            .find(|(head, tail, _)| line.contains(&format!("{head}{tail}")))
            .map(|(head, tail, what)| format!("`{head}{tail}`: {what}"))
    });
    assert_none(found, "these lines do not belong in the repository:");
}

#[test]
fn every_allowed_unwrap_has_a_reason() {
    let files = tracked();
    let rust = files.iter().filter(|file| file.path.ends_with(".rs"));
    let found = findings(rust, |line| {
        let line = line.trim();
        let allowed = line.starts_with("#[allow(") || line.starts_with("#![allow(");
        let lint = line.contains("clippy::unwrap_used") || line.contains("clippy::expect_used");
        (allowed && lint && line.ends_with(")]") && !line.contains("reason"))
            .then(|| "say why in `reason = \"…\"`".to_owned())
    });
    assert_none(found, "an allowed unwrap without its proof:");
}

/// Whether a line of a .proto file declares something that a reader asks about.
fn declares(line: &str) -> bool {
    let kinds = ["message ", "enum ", "service ", "oneof ", "rpc "];
    let field = line.split_once(" = ").is_some_and(|(head, number)| {
        !head.starts_with("syntax") && number.trim_end_matches(';').parse::<u32>().is_ok()
    });
    field || kinds.iter().any(|kind| line.starts_with(kind))
}

#[test]
fn every_part_of_the_contract_is_documented() {
    let files = tracked();
    let mut declared = 0;
    let mut bare = Vec::new();
    for file in files.iter().filter(|file| file.path.ends_with(".proto")) {
        let mut before = "";
        for (number, line) in file.text.lines().enumerate() {
            let line = line.trim();
            if declares(line) {
                declared += 1;
                if !before.starts_with("//") {
                    bare.push(format!("{}:{}: {line}", file.path, number + 1));
                }
            }
            before = line;
        }
    }
    assert!(declared > 100, "only {declared} declarations seen");
    assert_none(bare, "say what these are, in a comment above each:");
}

#[test]
fn crates_share_versions_and_lints_and_have_no_features() {
    let members = ["proto", "kernels", "brain", "pilot", "tests"];
    for member in members {
        let path = root().join(member).join("Cargo.toml");
        let text = fs::read_to_string(&path).unwrap();
        assert!(
            text.contains("[lints]\nworkspace = true"),
            "{member}: inherit the lints"
        );
        assert!(
            !text.contains("[features]"),
            "{member}: one binary everywhere, no features"
        );
        let own_version = text.lines().find(|line| {
            let value = line.split_once('=').map_or("", |(_, value)| value.trim());
            value.starts_with('"')
                && value[1..].starts_with(|c: char| c.is_ascii_digit() || c == '=')
        });
        assert_eq!(
            own_version, None,
            "{member}: versions belong in the workspace's Cargo.toml"
        );
    }
}

#[test]
fn every_dependency_has_an_allowed_licence_and_source() {
    let deny = fs::read_to_string(root().join("deny.toml")).unwrap();
    let allow = deny
        .split_once("allow = [")
        .unwrap()
        .1
        .split_once(']')
        .unwrap()
        .0;
    let allowed: Vec<&str> = allow.split('"').skip(1).step_by(2).collect();
    let metadata = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(
        metadata.status.success(),
        "{}",
        String::from_utf8_lossy(&metadata.stderr)
    );
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 100, "only {} packages", packages.len());
    let refused: Vec<_> = packages
        .iter()
        .filter(|package| {
            let licence = package["license"].as_str().unwrap_or_default();
            let source = package["source"].as_str();
            let registry = source.is_none_or(|source| source.starts_with("registry+"));
            !registry || !satisfied(licence, &allowed)
        })
        .map(|package| {
            format!(
                "{}: {} from {}",
                package["name"], package["license"], package["source"]
            )
        })
        .collect();
    assert_none(refused, "deny.toml does not allow these dependencies:");
}

/// Whether an SPDX expression (AND binds tighter than OR; `/` is an old OR) is met by `allowed`.
fn satisfied(expression: &str, allowed: &[&str]) -> bool {
    let expression = expression.replace(" / ", " OR ").replace('/', " OR ");
    // The one form with brackets in use is `(A OR B) AND C`.
    if let Some((group, rest)) = expression
        .strip_prefix('(')
        .and_then(|rest| rest.split_once(") AND "))
    {
        return satisfied(group, allowed) && satisfied(rest, allowed);
    }
    expression.split(" OR ").any(|option| {
        option
            .split(" AND ")
            .all(|one| allowed.contains(&one.trim()))
    })
}

#[test]
fn licence_expressions_are_read_right() {
    let allowed = ["MIT", "ISC"];
    for (expression, met) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("GPL-3.0 OR MIT", true),
        ("GPL-3.0/MIT", true),
        ("MIT AND GPL-3.0", false),
        ("MIT AND ISC", true),
        ("(MIT OR GPL-3.0) AND ISC", true),
        ("(MIT OR GPL-3.0) AND GPL-3.0", false),
        ("", false),
    ] {
        assert_eq!(satisfied(expression, &allowed), met, "{expression}");
    }
}

/// What a document's text has in backticks.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

#[test]
fn documents_name_files_and_tests_that_are_there() {
    const CODE: [&str; 5] = [".rs", ".cu", ".cuh", ".py", ".sh"];
    let files = tracked();
    let is_there = |path: &str| {
        let inner = format!("/{path}");
        files
            .iter()
            .any(|f| f.path == path || f.path.ends_with(&inner))
    };
    let is_test = |name: &str| {
        let head = format!("fn {name}(");
        files
            .iter()
            .any(|f| f.path.ends_with(".rs") && f.text.contains(&head))
    };
    let documents = files.iter().filter(|file| file.path.ends_with(".md"));
    let found = findings(documents, |line| {
        let one = |ending: &str| quoted(line).any(|q| q.ends_with(ending) && q.contains('/'));
        let names_code = CODE.iter().any(|ending| one(ending));
        let wrong = |q: &&str| {
            let path = q.contains('/') && CODE.iter().any(|ending| q.ends_with(ending));
            let plain = q
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"_-./".contains(&b));
            let words = q.split('_').count();
            let lower = q
                .bytes()
                .all(|b| b == b'_' || b.is_ascii_lowercase() || b.is_ascii_digit());
            match (path && plain, lower && words > 3) {
                (true, _) => !is_there(q),
                (false, true) => names_code && !is_test(q),
                (false, false) => false,
            }
        };
        quoted(line).find(wrong).map(str::to_owned)
    });
    assert_none(found, "a document names a file or a test that is not there");
}
