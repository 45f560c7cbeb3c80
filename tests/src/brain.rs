//! A brain of this test's own, on a free loopback port.

use std::path::PathBuf;

use marathon_proto::{
    auth::Token,
    brain::brain_client::BrainClient,
    net::{BrainChannel, ConnectOptions, RemoteAddr, channel},
};

use crate::{Program, command};

/// How a brain differs from `brain serve --device fake`.
#[derive(Clone, Debug, Default)]
pub struct BrainOptions {
    /// More flags.
    pub flags: Vec<String>,
    /// The token file that server and client share.
    pub token_file: Option<PathBuf>,
    /// Serve HTTP too.
    pub http: bool,
}

impl BrainOptions {
    /// A fake device, with these flags.
    pub fn fake(flags: &[&str]) -> Self {
        let fake = ["--device", "fake"];
        Self {
            flags: fake
                .iter()
                .chain(flags)
                .map(|flag| (*flag).to_owned())
                .collect(),
            token_file: None,
            http: false,
        }
    }
}

/// A brain that serves.
pub struct Brain {
    /// Its process.
    pub program: Program,
    /// `IP:PORT`.
    pub addr: String,
    /// `http://IP:PORT`; empty without HTTP.
    pub http: String,
    /// What it serves.
    pub fingerprint: String,
    options: BrainOptions,
}

impl Brain {
    /// Starts it and waits for its ready line.
    pub fn start(options: BrainOptions) -> Self {
        let mut command = command("brain");
        command
            .args(["serve", "--grpc-addr", "127.0.0.1:0", "--http-addr"])
            .arg(if options.http { "127.0.0.1:0" } else { "none" })
            .args(&options.flags);
        if let Some(file) = &options.token_file {
            command.arg("--token-file").arg(file);
        }
        let mut program = Program::start(&mut command);
        let ready = program.wait_for("ready line", |line| {
            line.starts_with("ready ").then(|| line.to_owned())
        });
        let find = |name: &str| {
            ready
                .split(' ')
                .find_map(|word| word.strip_prefix(&format!("{name}=")))
        };
        let field = |name: &str| {
            find(name)
                .unwrap_or_else(|| panic!("`{ready}` has no {name}"))
                .to_owned()
        };
        Self {
            program,
            addr: field("addr"),
            http: find("http").map_or_else(String::new, |addr| format!("http://{addr}")),
            fingerprint: field("fingerprint"),
            options,
        }
    }

    /// A channel with this brain's token.
    pub fn channel(&self) -> BrainChannel {
        self.channel_with(
            self.options
                .token_file
                .as_deref()
                .map(|file| Token::from_file(file).unwrap()),
        )
    }

    /// A channel with another token, or none.
    pub fn channel_with(&self, token: Option<Token>) -> BrainChannel {
        let addr: RemoteAddr = self.addr.parse().unwrap();
        let options = ConnectOptions {
            token,
            ..ConnectOptions::default()
        };
        channel(&addr, options).unwrap()
    }

    /// A client of it.
    pub fn client(&self) -> BrainClient<BrainChannel> {
        BrainClient::new(self.channel())
    }
}
