//! What is put into the prompt: heads, tool results, nudges. The brain renders, the journal keeps
//! the tokens, so that no later rendering can differ.

use marathon_proto::brain::{Conversation, Message, Tool};

use super::{Driver, Halt};
use crate::{
    brain::BrainError,
    journal::Durability,
    run::{
        decide::results_limit,
        entry::{Created, Entry, Turn},
        event::RunEvent,
        prompt::{self, COMPACTION_NOTE, NUDGE},
        state::Phase,
    },
    tools::{ToolCall, ToolOutput, Toolbox},
};

/// Tries at shortening results that do not fit into the room for them.
const SHORTENINGS: u32 = 8;

impl Driver {
    /// Renders a head and begins a prompt with it.
    pub(super) async fn start_prompt(&mut self, first: u64, note: bool) -> Result<(), Halt> {
        let conversation = head(&self.parts.tools, &self.state().created, note);
        let head = self.render(conversation, Vec::new()).await?;
        let before = self.state().prompt.len();
        let started = Entry::PromptStarted {
            head,
            first_exchange: first,
        };
        self.ledger.commit(vec![started], Durability::Lazy).await?;
        if note {
            let prompt = &self.state().prompt;
            self.tell(&RunEvent::Compacted {
                from_tokens: before as u32,
                to_tokens: prompt.len() as u32,
                kept: prompt.exchanges.len() as u64,
            });
            self.parts.fail.hit("after-compaction");
        }
        Ok(())
    }

    /// Puts the results of an answer's calls after it.
    pub(super) async fn append_results(
        &mut self,
        results: Vec<(ToolCall, ToolOutput)>,
    ) -> Result<(), Halt> {
        let cap = results_limit(self.state());
        let mut longest = usize::MAX;
        for attempt in 0.. {
            let messages = results
                .iter()
                .map(|(call, output)| result(call, prompt::shorten(&output.text, longest)));
            let ids = self.render_after_answer(messages.collect()).await?;
            if ids.len() <= cap || attempt == SHORTENINGS {
                return self.append(ids, false).await;
            }
            let now = results
                .iter()
                .map(|(_, output)| output.text.len().min(longest))
                .max();
            // In proportion, and a little more, so that few tries are needed.
            longest = (now.unwrap_or(0) as f64 * 0.9 * cap as f64 / ids.len() as f64) as usize;
        }
        Ok(())
    }

    /// Asks for a tool call.
    pub(super) async fn nudge(&mut self) -> Result<(), Halt> {
        let ids = self
            .render_after_answer(vec![message("user", NUDGE.to_owned())])
            .await?;
        self.append(ids, true).await?;
        let count = self.state().nudges;
        self.tell(&RunEvent::Nudged { count });
        Ok(())
    }

    async fn append(&mut self, ids: Vec<u32>, nudge: bool) -> Result<(), Halt> {
        let appended = Entry::MessagesAppended { ids, nudge };
        self.ledger.commit(vec![appended], Durability::Lazy).await?;
        self.parts.fail.hit("after-append");
        Ok(())
    }

    /// Whether the brain can append results, or a nudge, to this answer.
    pub(super) async fn could_append(&mut self, turn: &Turn, answer: &[u32]) -> Result<bool, Halt> {
        let result = |call: &ToolCall| result(call, String::from("x"));
        let messages = match turn.calls.as_slice() {
            [] => vec![message("user", NUDGE.to_owned())],
            calls => calls.iter().map(result).collect(),
        };
        let mut tokens = self.state().prompt.tokens();
        tokens.extend_from_slice(answer);
        let conversation = Conversation {
            messages,
            tools: self.declared(),
            enable_thinking: false,
        };
        self.check_model().await?;
        self.ask(|brain| {
            let (what, after) = (conversation.clone(), tokens.clone());
            async move {
                match brain.render(what, after).await {
                    Ok(_) => Ok(true),
                    Err(BrainError::Refused { .. }) => Ok(false),
                    Err(other) => Err(other),
                }
            }
        })
        .await
    }

    async fn render_after_answer(&mut self, messages: Vec<Message>) -> Result<Vec<u32>, Halt> {
        let conversation = Conversation {
            messages,
            tools: self.declared(),
            enable_thinking: false,
        };
        let mut tokens = self.state().prompt.tokens();
        if let Phase::Answered(answered) = &self.state().phase {
            tokens.extend_from_slice(&answered.tokens);
        }
        self.render(conversation, tokens).await
    }

    async fn render(&mut self, what: Conversation, after: Vec<u32>) -> Result<Vec<u32>, Halt> {
        self.check_model().await?;
        self.ask(|brain| {
            let (what, after) = (what.clone(), after.clone());
            async move { brain.render(what, after).await }
        })
        .await
    }

    /// The tools, as the brain is told of them.
    pub(super) fn declared(&self) -> Vec<Tool> {
        declared(&self.parts.tools)
    }
}

/// What every prompt of a run begins with; `note` says that earlier steps were left out.
pub(super) fn head(tools: &Toolbox, created: &Created, note: bool) -> Conversation {
    let goal = if note {
        format!("{}{COMPACTION_NOTE}", created.goal)
    } else {
        created.goal.clone()
    };
    Conversation {
        messages: vec![
            message("system", created.system.clone()),
            message("user", goal),
        ],
        tools: declared(tools),
        enable_thinking: false,
    }
}

fn declared(tools: &Toolbox) -> Vec<Tool> {
    let tool = |tool: crate::tools::Declaration| Tool {
        name: tool.name,
        description: tool.description,
        parameters_json: tool.parameters_json,
        strict: false,
    };
    tools.declarations().into_iter().map(tool).collect()
}

fn message(role: &str, content: String) -> Message {
    Message {
        role: role.into(),
        content,
        ..Message::default()
    }
}

fn result(call: &ToolCall, content: String) -> Message {
    Message {
        role: "tool".into(),
        content,
        tool_call_id: call.id.clone(),
        name: call.name.clone(),
        ..Message::default()
    }
}
