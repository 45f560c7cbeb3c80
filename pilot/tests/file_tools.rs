//! The file tools on a real workspace: results, escapes, and every state a crash can leave.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::PathBuf,
    sync::Arc,
};

use pilot::{
    driver::failpoint::FailPoints,
    tools::{
        Execution, Facts, Standing, ToolCall, ToolContext, ToolOutput, Toolbox, beneath::MAX_FILE,
        limit::MAX_RESULT, toolbox,
    },
};
use serde_json::{Value, json};

struct Bench {
    root: tempfile::TempDir,
    tools: Toolbox,
    context: ToolContext,
}

impl Bench {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let workspace = root.path().join("workspace");
        fs::create_dir_all(workspace.join("inbox")).unwrap();
        fs::write(root.path().join("secret.txt"), "secret\n").unwrap();
        let context = ToolContext {
            workspace,
            spool: root.path().join("spool"),
            call: 0,
            cancel: Default::default(),
            fail: Arc::new(FailPoints::default()),
        };
        Self {
            root,
            tools: toolbox(false),
            context,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.context.workspace.join(name)
    }

    fn put(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).unwrap();
    }

    fn get(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    fn call(name: &str, arguments: &Value) -> ToolCall {
        ToolCall {
            id: "call_0".into(),
            name: name.into(),
            arguments: arguments.to_string(),
        }
    }

    fn intend(&self, name: &str, arguments: &Value) -> Result<Facts, ToolOutput> {
        self.tools
            .find(name)
            .unwrap()
            .prepare(&Self::call(name, arguments), &self.context)
    }

    fn act(&self, name: &str, arguments: &Value, facts: &Facts) -> String {
        let call = Self::call(name, arguments);
        match self
            .tools
            .find(name)
            .unwrap()
            .execute(&call, facts, &self.context)
        {
            Execution::Ended(output) => output.text,
            Execution::Interrupted => panic!("not interrupted"),
        }
    }

    fn inspect(&self, name: &str, arguments: &Value, facts: &Facts) -> Standing {
        let call = Self::call(name, arguments);
        self.tools
            .find(name)
            .unwrap()
            .inspect(&call, facts, &self.context)
    }

    fn repair(&self, name: &str, arguments: &Value, facts: &Facts) {
        let call = Self::call(name, arguments);
        self.tools
            .find(name)
            .unwrap()
            .repair(&call, facts, &self.context)
            .unwrap();
    }

    fn run(&self, name: &str, arguments: Value) -> String {
        match self.intend(name, &arguments) {
            Ok(facts) => self.act(name, &arguments, &facts),
            Err(refusal) => refusal.text,
        }
    }
}

#[test]
fn results_are_what_the_model_was_trained_on() {
    let bench = Bench::new();
    assert_eq!(bench.run("ls", json!({"path": "inbox"})), "(empty)");
    assert_eq!(
        bench.run("write", json!({"path": "r.txt", "content": "head"})),
        "wrote r.txt"
    );
    let more = json!({"path": "r.txt", "content": "a | b\n"});
    assert_eq!(bench.run("append", more), "appended to r.txt");
    assert_eq!(bench.get("r.txt"), "head\na | b\n");
    assert_eq!(bench.run("read", json!({"path": "r.txt"})), "head\na | b");
    let edit =
        |old: &str, new: &str| bench.run("edit", json!({"path": "r.txt", "old": old, "new": new}));
    assert_eq!(
        edit("a", "c"),
        "error: r.txt: text occurs 2 times; make it unique"
    );
    assert_eq!(edit("a |", "c |"), "edited r.txt");
    assert_eq!(edit("zz", "c"), "error: r.txt: text not found");
    assert_eq!(edit("", "c"), "error: r.txt: text not found");
    assert_eq!(bench.get("r.txt"), "head\nc | b\n");
    fs::create_dir(bench.path("inbox/dir.txt")).unwrap();
    symlink("nowhere/x", bench.path("inbox/gone.txt")).unwrap();
    bench.put("inbox/bin.txt", b"\xff\xfe\0\x01");
    bench.put("inbox/zero.txt", b"text\0text");
    let listing = "bin.txt\ndir.txt/\ngone.txt\nzero.txt";
    assert_eq!(bench.run("ls", json!({"path": "inbox"})), listing);
    assert_eq!(bench.run("ls", json!({"path": "./inbox//"})), listing);
    assert_eq!(
        bench.run("ls", json!({"path": "none"})),
        "error: none: no such file"
    );
    assert_eq!(
        bench.run("ls", json!({"path": "r.txt"})),
        "error: r.txt: not a directory"
    );
    for (name, why) in [
        ("gone", "no such file"),
        ("dir", "is a directory"),
        ("bin", "not a text file"),
        ("zero", "not a text file"),
        ("none", "no such file"),
    ] {
        let path = format!("inbox/{name}.txt");
        let said = format!("error: {path}: {why}");
        assert_eq!(bench.run("read", json!({"path": path})), said);
        assert_eq!(
            bench.run("edit", json!({"path": path, "old": "a", "new": "b"})),
            said
        );
        if name != "none" {
            assert_eq!(
                bench.run("append", json!({"path": path, "content": "a"})),
                said
            );
        }
    }
}

#[test]
fn names_are_sorted_by_bytes_with_the_slash_counted() {
    let bench = Bench::new();
    fs::create_dir(bench.path("inbox/ab")).unwrap();
    for name in ["ab.txt", "B", "é", "a b", "ab-"] {
        bench.put(&format!("inbox/{name}"), "");
    }
    assert_eq!(
        bench.run("ls", json!({"path": "inbox"})),
        "B\na b\nab-\nab.txt\nab/\né"
    );
}

#[test]
fn nothing_escapes() {
    let bench = Bench::new();
    let outside = bench.root.path().join("secret.txt");
    symlink(&outside, bench.path("absolute")).unwrap();
    symlink("../secret.txt", bench.path("relative")).unwrap();
    symlink("..", bench.path("inbox/up")).unwrap();
    symlink("../..", bench.path("inbox/out")).unwrap();
    symlink("loop", bench.path("loop")).unwrap();
    symlink(bench.root.path(), bench.path("folder")).unwrap();
    for (path, why) in [
        (outside.to_str().unwrap(), "outside the workspace"),
        ("/etc/passwd", "outside the workspace"),
        ("../secret.txt", "outside the workspace"),
        ("inbox/../../secret.txt", "outside the workspace"),
        ("absolute", "outside the workspace"),
        ("relative", "outside the workspace"),
        ("inbox/out/secret.txt", "outside the workspace"),
        ("inbox/up/../secret.txt", "outside the workspace"),
        ("folder/secret.txt", "outside the workspace"),
        ("loop", "too many links"),
        ("a\0b", "not a valid path"),
        (&"a/".repeat(3000), "not a valid path"),
        (&"a".repeat(300), "not a valid path"),
    ] {
        let shown: String = path.chars().take(200).collect();
        let said = format!("error: {shown}: {why}");
        for (tool, arguments) in [
            ("read", json!({"path": path})),
            ("ls", json!({"path": path})),
            ("write", json!({"path": path, "content": "x"})),
            ("append", json!({"path": path, "content": "x"})),
            ("edit", json!({"path": path, "old": "secret", "new": "x"})),
        ] {
            assert_eq!(bench.run(tool, arguments), said, "{tool}");
        }
    }
    assert_eq!(fs::read_to_string(outside).unwrap(), "secret\n");
    // Inside, links and dots are as good as names.
    bench.put("here.txt", "here\n");
    symlink("../here.txt", bench.path("inbox/link")).unwrap();
    assert_eq!(
        bench.run("read", json!({"path": "inbox/up/inbox/link"})),
        "here"
    );
    assert_eq!(
        bench.run("write", json!({"path": "inbox/link", "content": "new"})),
        "wrote inbox/link"
    );
    assert_eq!(bench.get("here.txt"), "new\n");
    assert!(bench.path("inbox/link").is_symlink());
}

#[test]
fn pipes_and_devices_do_not_hang() {
    let bench = Bench::new();
    let made = std::process::Command::new("mkfifo")
        .arg(bench.path("pipe"))
        .status()
        .unwrap();
    assert!(made.success());
    for (tool, arguments) in [
        ("read", json!({"path": "pipe"})),
        ("append", json!({"path": "pipe", "content": "x"})),
        ("edit", json!({"path": "pipe", "old": "a", "new": "b"})),
        ("write", json!({"path": "pipe", "content": "x"})),
    ] {
        assert_eq!(bench.run(tool, arguments), "error: pipe: not a text file");
    }
}

#[test]
fn large_files_are_shown_in_part_and_huge_ones_refused() {
    let bench = Bench::new();
    let text: String = (1..=5000).map(|n| format!("line {n}\n")).collect();
    bench.put("long.txt", &text);
    let shown = bench.run("read", json!({"path": "long.txt"}));
    assert!(
        shown.len() < MAX_RESULT + 100 && shown.contains("bytes left out"),
        "{}",
        shown.len()
    );
    let part = |offset: u64, limit: u64| {
        bench.run(
            "read",
            json!({"path": "long.txt", "offset": offset, "limit": limit}),
        )
    };
    assert_eq!(part(4999, 5), "line 4999\nline 5000");
    assert_eq!(part(2, 2), "line 2\nline 3");
    assert_eq!(part(0, 1), "line 1");
    assert_eq!(part(5001, 1), "error: long.txt: has 5000 lines");
    assert_eq!(part(u64::MAX, u64::MAX), "error: long.txt: has 5000 lines");
    fs::File::create(bench.path("huge"))
        .unwrap()
        .set_len(MAX_FILE + 1)
        .unwrap();
    assert_eq!(
        bench.run("read", json!({"path": "huge"})),
        "error: huge: file too large"
    );
}

#[test]
fn write_makes_folders_and_keeps_the_mode() {
    let bench = Bench::new();
    let new = json!({"path": "a/b/c.txt", "content": "x"});
    assert_eq!(bench.run("write", new), "wrote a/b/c.txt");
    assert_eq!(bench.get("a/b/c.txt"), "x\n");
    let script = bench.path("run.sh");
    bench.put("run.sh", "old");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o750)).unwrap();
    bench.run("write", json!({"path": "run.sh", "content": "new"}));
    bench.run(
        "edit",
        json!({"path": "run.sh", "old": "new", "new": "newer"}),
    );
    assert_eq!(
        fs::metadata(&script).unwrap().permissions().mode() & 0o7777,
        0o750
    );
    assert_eq!(bench.get("run.sh"), "newer\n");
    // Nothing is left beside the files.
    assert_eq!(bench.run("ls", json!({"path": "."})), "a/\ninbox/\nrun.sh");
    assert_eq!(
        bench.run("write", json!({"path": "x/../y/z", "content": ""})),
        "error: x/../y/z: no such file"
    );
    assert!(!bench.path("x").exists());
}

#[test]
fn a_crash_anywhere_in_an_append_is_decided_by_the_file() {
    for old in [None, Some(""), Some("old\n")] {
        let arguments = json!({"path": "log.txt", "content": "first\nsecond"});
        let whole = format!("{}first\nsecond\n", old.unwrap_or_default());
        for cut in 0..=whole.len() {
            let bench = Bench::new();
            if let Some(old) = old {
                bench.put("log.txt", old);
            }
            let facts = bench.intend("append", &arguments).unwrap();
            let reached = cut >= old.map_or(0, str::len);
            if !reached {
                continue;
            }
            bench.put("log.txt", &whole[..cut]);
            match bench.inspect("append", &arguments, &facts) {
                Standing::Done(output) => {
                    assert_eq!(cut, whole.len());
                    assert_eq!(output.text, "appended to log.txt");
                }
                Standing::Redo => {
                    assert_eq!(Some(cut), old.map(str::len));
                    assert_eq!(
                        bench.act("append", &arguments, &facts),
                        "appended to log.txt"
                    );
                }
                Standing::Torn => {
                    bench.repair("append", &arguments, &facts);
                    let left = fs::read_to_string(bench.path("log.txt")).ok();
                    assert_eq!(left.as_deref(), old);
                    assert_eq!(
                        bench.act("append", &arguments, &facts),
                        "appended to log.txt"
                    );
                }
                Standing::Unknown(text) => panic!("{cut}: {text}"),
            }
            assert_eq!(bench.get("log.txt"), whole);
        }
    }
}

#[test]
fn a_foreign_change_is_never_overwritten() {
    let bench = Bench::new();
    bench.put("log.txt", "old\n");
    let append = json!({"path": "log.txt", "content": "new"});
    let edit = json!({"path": "log.txt", "old": "old", "new": "new"});
    let appended = bench.intend("append", &append).unwrap();
    let edited = bench.intend("edit", &edit).unwrap();
    bench.put("log.txt", "mine\n");
    let said = "error: log.txt: was changed by someone else; read it again";
    assert_eq!(
        bench.inspect("append", &append, &appended),
        Standing::Unknown(said[7..].into())
    );
    assert_eq!(
        bench.inspect("edit", &edit, &edited),
        Standing::Unknown(said[7..].into())
    );
    assert_eq!(bench.act("append", &append, &appended), said);
    assert_eq!(bench.act("edit", &edit, &edited), said);
    assert_eq!(bench.get("log.txt"), "mine\n");
}

#[test]
fn a_crash_anywhere_in_an_edit_leaves_the_old_or_the_new_file() {
    let bench = Bench::new();
    bench.put("a.txt", "state: open\n");
    let arguments = json!({"path": "a.txt", "old": "open", "new": "done"});
    let facts = bench.intend("edit", &arguments).unwrap();
    // Not begun, or killed before the new file took the old one's place.
    assert_eq!(bench.inspect("edit", &arguments, &facts), Standing::Redo);
    assert_eq!(bench.act("edit", &arguments, &facts), "edited a.txt");
    // Killed after.
    let done = Standing::Done(ToolOutput::ok("edited a.txt"));
    assert_eq!(bench.inspect("edit", &arguments, &facts), done);
    assert_eq!(bench.act("edit", &arguments, &facts), "edited a.txt");
    assert_eq!(bench.get("a.txt"), "state: done\n");
    assert_eq!(bench.run("ls", json!({"path": "."})), "a.txt\ninbox/");
}

#[test]
fn finish_ends_the_run_with_the_models_words() {
    let bench = Bench::new();
    let call = Bench::call("finish", &json!({"summary": "All done."}));
    let tool = bench.tools.find("finish").unwrap();
    let facts = tool.prepare(&call, &bench.context).unwrap();
    let Execution::Ended(output) = tool.execute(&call, &facts, &bench.context) else {
        panic!()
    };
    assert_eq!(output.finish.as_deref(), Some("All done."));
    assert!(!output.error);
    assert!(bench.tools.find("bash").is_none());
}
