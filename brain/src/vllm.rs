//! vLLM's flags, for people who bring their command line: accepted where they say what brain does
//! anyway, otherwise answered with brain's own.

use clap::Args;

use crate::error::Error;

/// Flags of `vllm serve` that brain knows by name. None of them is shown in `--help`.
#[derive(Debug, Default, Args)]
pub struct VllmFlags {
    #[arg(long, hide = true)]
    enable_chunked_prefill: bool,
    #[arg(long, hide = true)]
    enable_prefix_caching: bool,
    #[arg(long, hide = true)]
    enable_auto_tool_choice: bool,
    #[arg(long, hide = true, value_name = "NAME")]
    tool_call_parser: Option<String>,
    #[arg(long, hide = true, value_name = "NAME")]
    reasoning_parser: Option<String>,
    #[arg(long, hide = true, value_name = "JSON")]
    speculative_config: Option<String>,
    #[arg(long, hide = true, value_name = "NAME")]
    attention_backend: Option<String>,
    #[arg(long, hide = true, value_name = "KEY")]
    api_key: Option<String>,
    #[arg(long, hide = true, value_name = "HOST")]
    host: Option<String>,
    #[arg(long, hide = true, value_name = "PORT")]
    port: Option<String>,
    #[arg(long, hide = true, value_name = "ORIGINS")]
    allowed_origins: Option<String>,
}

impl VllmFlags {
    /// Refuses what brain does in another way, with the way.
    ///
    /// # Errors
    /// [`Error::Usage`] with brain's own flag.
    pub fn check(&self) -> Result<(), Error> {
        let answers = [
            (
                "speculative-config",
                self.speculative_config.is_some(),
                "brain drafts with the model's own drafter: choose it with --drafter and its \
                 depth with --draft-tokens",
            ),
            (
                "attention-backend",
                self.attention_backend.is_some(),
                "each device has one: leave it out",
            ),
            (
                "api-key",
                self.api_key.is_some(),
                "a key on the command line shows in process listings: give --api-key-file",
            ),
            ("host", self.host.is_some(), "give --http-addr HOST:PORT"),
            ("port", self.port.is_some(), "give --http-addr HOST:PORT"),
            (
                "allowed-origins",
                self.allowed_origins.is_some(),
                "give --cors-origins ORIGIN,…",
            ),
        ];
        for (flag, given, answer) in answers {
            if given {
                return Err(Error::Usage(format!("--{flag} is vLLM's: {answer}")));
            }
        }
        for (flag, parser) in [
            ("tool-call-parser", &self.tool_call_parser),
            ("reasoning-parser", &self.reasoning_parser),
        ] {
            if let Some(name) = parser.as_ref().filter(|name| *name != "gemma4") {
                return Err(Error::Usage(format!(
                    "--{flag} {name:.40}: brain reads Gemma 4's turns alone, give gemma4 or \
                     leave it out"
                )));
            }
        }
        Ok(())
    }

    /// The given flags that change nothing, because brain always does what they ask for.
    pub fn always(&self) -> impl Iterator<Item = &'static str> {
        [
            ("--enable-chunked-prefill", self.enable_chunked_prefill),
            ("--enable-prefix-caching", self.enable_prefix_caching),
            ("--enable-auto-tool-choice", self.enable_auto_tool_choice),
        ]
        .into_iter()
        .filter_map(|(flag, given)| given.then_some(flag))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::cli::{Cli, Command};

    fn check(flags: &[&str]) -> Result<Vec<&'static str>, String> {
        let cli = Cli::parse_from(["brain", "serve"].iter().chain(flags));
        let Command::Serve(args) = cli.command else {
            panic!("not serve")
        };
        args.vllm.check().map_err(|error| error.to_string())?;
        Ok(args.vllm.always().collect())
    }

    #[test]
    fn flags_are_accepted_or_answered_with_brains_own() {
        let accepted = [
            "--enable-chunked-prefill",
            "--enable-prefix-caching",
            "--enable-auto-tool-choice",
            "--tool-call-parser",
            "gemma4",
            "--reasoning-parser",
            "gemma4",
        ];
        assert_eq!(check(&accepted).unwrap(), accepted[..3]);
        assert!(check(&[]).unwrap().is_empty());
        for (flags, answer) in [
            (["--speculative-config", "{}"], "--draft-tokens"),
            (["--attention-backend", "FLASHINFER"], "leave it out"),
            (["--api-key", "x"], "--api-key-file"),
            (["--host", "0.0.0.0"], "--http-addr"),
            (["--port", "8000"], "--http-addr"),
            (["--allowed-origins", "[]"], "--cors-origins"),
            (["--tool-call-parser", "hermes"], "gemma4"),
        ] {
            let error = check(&flags).unwrap_err();
            assert!(error.contains(answer), "{error}");
        }
    }
}
