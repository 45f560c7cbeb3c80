//! An HTTP front end of a test's own over a fake device, and what its streams bring.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "every test binary uses its own part"
)]

use brain::{
    bringup,
    callers::Keys,
    cli::{Cli, Command},
    config::{Config, Loaded},
    http::{HttpServer, Setup},
    serving::Serving,
};
use clap::Parser as _;
use reqwest::{Client, RequestBuilder, Response};
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

/// A server; it ends when this is dropped.
pub struct Server {
    pub base: String,
    pub client: Client,
    /// Gives it the model.
    pub model: watch::Sender<Option<Serving>>,
    pub ending: CancellationToken,
    config: Config,
    _end: DropGuard,
}

/// A server whose model is still loading.
pub async fn start_loading(flags: &[&str]) -> Server {
    start_with_keys(flags, None).await
}

/// The same, with keys as the environment gives them.
pub async fn start_with_keys(flags: &[&str], keys: Option<&str>) -> Server {
    let fixed = [
        "brain",
        "serve",
        "--device",
        "fake",
        "--http-addr",
        "127.0.0.1:0",
    ];
    let Command::Serve(args) = Cli::parse_from(fixed.iter().chain(flags)).command else {
        panic!("not serve")
    };
    let config = Loaded::new(None, &args.settings).unwrap().check().unwrap();
    let ending = CancellationToken::new();
    let setup = Setup {
        keys: Keys::gather(None, config.api_key_file.as_deref(), keys).unwrap(),
        tls: None,
        model_name: config.name.clone(),
        ending: ending.clone(),
    };
    // The client wants one, although these tests speak without TLS.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let server = HttpServer::bind(&config.http, setup)
        .await
        .unwrap()
        .unwrap();
    let base = format!("http://{}", server.local_addr().unwrap());
    let model = server.model();
    let end = CancellationToken::new();
    tokio::spawn(server.serve(end.clone()));
    Server {
        base,
        client: Client::new(),
        model,
        ending,
        config,
        _end: end.drop_guard(),
    }
}

/// A server that serves.
pub async fn start(flags: &[&str]) -> Server {
    let server = start_loading(flags).await;
    server.load();
    server
}

impl Server {
    /// Loads the model and hands it over.
    pub fn load(&self) -> Serving {
        let serving = bringup::bring_up(&self.config).unwrap();
        self.model.send_replace(Some(serving.clone()));
        serving
    }

    pub fn serving(&self) -> Serving {
        self.model.borrow().clone().expect("a loaded model")
    }

    pub fn get(&self, path: &str) -> RequestBuilder {
        self.client.get(format!("{}{path}", self.base))
    }

    pub fn post(&self, path: &str, body: &Value) -> RequestBuilder {
        self.client.post(format!("{}{path}", self.base)).json(body)
    }

    /// Posts and expects success.
    pub async fn ask(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body).send().await.unwrap();
        let status = response.status();
        let answer: Value = response.json().await.unwrap();
        assert!(status.is_success(), "{status}: {answer}");
        answer
    }

    /// Posts and expects an error of this status; gives its `error`.
    pub async fn refused(&self, path: &str, body: &Value, status: u16) -> Value {
        let response = self.post(path, body).send().await.unwrap();
        let found = response.status().as_u16();
        let answer: Value = response.json().await.unwrap();
        assert_eq!(found, status, "{answer}");
        assert!(answer["error"]["message"].is_string(), "{answer}");
        answer["error"].clone()
    }
}

/// One server-sent event.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub name: String,
    pub id: Option<String>,
    pub data: String,
}

impl Event {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap_or_else(|_| panic!("no JSON: {}", self.data))
    }
}

/// A response read event by event.
pub struct Stream {
    response: Response,
    buffer: String,
}

impl Stream {
    pub async fn open(request: RequestBuilder) -> Self {
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self {
            response,
            buffer: String::new(),
        }
    }

    /// The next event; comments are passed over; `None` at the end.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(end) = self.buffer.find("\n\n") {
                let block: String = self.buffer.drain(..end + 2).collect();
                if let Some(event) = parse(&block) {
                    return Some(event);
                }
                continue;
            }
            let bytes = self.response.chunk().await.unwrap()?;
            // Events are ASCII or whole characters in these tests' chunks.
            self.buffer.push_str(&String::from_utf8_lossy(&bytes));
        }
    }

    /// Everything to the end.
    pub async fn rest(mut self) -> Vec<Event> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        events
    }
}

fn parse(block: &str) -> Option<Event> {
    let field = |name: &str| {
        let lines: Vec<&str> = block
            .lines()
            .filter_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(|value| value.strip_prefix(' ').unwrap_or(value))
            .collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    };
    Some(Event {
        name: field("event").unwrap_or_default(),
        id: field("id"),
        data: field("data")?,
    })
}
