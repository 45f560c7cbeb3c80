//! Tool results and the calls that they answer.
//!
//! Every tool result must answer a call and every call must have a result, because the template
//! would otherwise show the model a conversation that never took place.

use std::collections::{HashMap, VecDeque};

use marathon_proto::brain as pb;

use super::error::ApiError;

/// Messages of one request, and calls in them, at most. What a client sends as one message may
/// hold many results: this counts what the model is shown.
pub(super) const MOST: usize = 20_000;

/// Pairs tool results with calls, by id or, where ids are missing, in order; fills in names.
/// `path` tells where in the request a message stands.
///
/// # Errors
/// The path of a result or a call that is alone, or of what is too much.
pub(super) fn pair(
    messages: &mut [pb::Message],
    path: &dyn Fn(usize) -> String,
) -> Result<(), ApiError> {
    check_counts(messages, path)?;
    let mut open = Open::default();
    for (index, message) in messages.iter_mut().enumerate() {
        if message.role != "tool" {
            open.refuse_left(path)?;
            open = Open::of(index, &message.tool_calls);
            continue;
        }
        let Some((id, name)) = open.answer(&message.tool_call_id) else {
            let at = path(index);
            let id = &message.tool_call_id;
            let what = format!("`{at}` answers {id:.80?}, which no call before it is");
            return Err(ApiError::invalid(format!("{at}.tool_call_id"), what));
        };
        message.tool_call_id = id;
        message.name = name;
    }
    open.refuse_left(path)
}

fn check_counts(messages: &[pb::Message], path: &dyn Fn(usize) -> String) -> Result<(), ApiError> {
    let too_much = |index: usize, kind: &str| {
        let at = path(index);
        let what = format!("with `{at}` there are more than {MOST} {kind}: send fewer");
        Err(ApiError::invalid(at, what))
    };
    if messages.len() > MOST {
        return too_much(MOST, "messages and tool results");
    }
    let mut calls = 0;
    for (index, message) in messages.iter().enumerate() {
        calls += message.tool_calls.len();
        if calls > MOST {
            return too_much(index, "tool calls");
        }
    }
    Ok(())
}

/// The calls of one message that have no result so far.
#[derive(Default)]
struct Open {
    /// Number of the message.
    message: usize,
    /// Ids and names by number; taken when answered.
    calls: Vec<Option<(String, String)>>,
    /// No call before this one is left.
    first: usize,
    /// Numbers of the calls of an id, in order; the empty id is that of calls without one.
    by_id: HashMap<String, VecDeque<usize>>,
}

impl Open {
    fn of(message: usize, calls: &[pb::ToolCall]) -> Self {
        let mut by_id = HashMap::<String, VecDeque<usize>>::new();
        for (number, call) in calls.iter().enumerate() {
            by_id.entry(call.id.clone()).or_default().push_back(number);
        }
        let calls = calls
            .iter()
            .map(|call| (call.id.clone(), call.name.clone()));
        let calls: Vec<_> = calls.map(Some).collect();
        Self {
            message,
            calls,
            first: 0,
            by_id,
        }
    }

    /// Takes the first call that a result of this id answers: one of that id or of none; any call
    /// when the result has none.
    fn answer(&mut self, id: &str) -> Option<(String, String)> {
        let number = match id {
            "" => self.first_left(),
            id => [self.next_of(id), self.next_of("")]
                .into_iter()
                .flatten()
                .min(),
        }?;
        self.calls.get_mut(number)?.take()
    }

    fn first_left(&mut self) -> Option<usize> {
        while self.calls.get(self.first)?.is_none() {
            self.first += 1;
        }
        Some(self.first)
    }

    /// The first call of this id that is left.
    fn next_of(&mut self, id: &str) -> Option<usize> {
        let numbers = self.by_id.get_mut(id)?;
        while self.calls.get(*numbers.front()?)?.is_none() {
            numbers.pop_front();
        }
        numbers.front().copied()
    }

    fn refuse_left(&mut self, path: &dyn Fn(usize) -> String) -> Result<(), ApiError> {
        let Some(number) = self.first_left() else {
            return Ok(());
        };
        let id = self.calls[number].as_ref().map_or("", |(id, _)| id);
        let at = format!("{}.tool_calls[{number}]", path(self.message));
        let what = format!("`{at}` ({id:.80?}) has no result: send a tool message for it");
        Err(ApiError::invalid(at, what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(ids: &[&str]) -> pb::Message {
        let calls = ids.iter().enumerate().map(|(number, &id)| pb::ToolCall {
            id: id.into(),
            name: format!("tool {number}"),
            ..pb::ToolCall::default()
        });
        pb::Message {
            role: "assistant".into(),
            tool_calls: calls.collect(),
            ..pb::Message::default()
        }
    }

    fn result(id: &str) -> pb::Message {
        pb::Message {
            role: "tool".into(),
            tool_call_id: id.into(),
            ..pb::Message::default()
        }
    }

    fn at(index: usize) -> String {
        format!("messages[{index}]")
    }

    /// Names of the tools that these results answer.
    fn answered(ids: &[&str], results: &[&str]) -> Result<Vec<String>, Option<String>> {
        let mut messages = vec![calls(ids)];
        messages.extend(results.iter().map(|id| result(id)));
        pair(&mut messages, &at).map_err(|error| error.param)?;
        Ok(messages.drain(1..).map(|message| message.name).collect())
    }

    #[test]
    fn results_find_their_calls_by_id_and_by_order_without() {
        for (ids, results, tools) in [
            (["a", "b", "c"], ["c", "a", "b"], [2, 0, 1]),
            (["", "", ""], ["", "", ""], [0, 1, 2]),
            // Calls without an id take the first result that comes.
            (["", "b", ""], ["b", "x", ""], [0, 2, 1]),
            (["a", "a", "b"], ["b", "a", "a"], [2, 0, 1]),
            (["a", "b", "c"], ["b", "", ""], [1, 0, 2]),
        ] {
            let names = answered(&ids, &results).unwrap();
            let expected = tools.map(|number| format!("tool {number}"));
            assert_eq!(names, expected, "{ids:?} {results:?}");
        }
    }

    #[test]
    fn what_is_alone_is_named() {
        let alone = |ids: &[&str], results: &[&str]| answered(ids, results).unwrap_err().unwrap();
        assert_eq!(alone(&["a"], &["b"]), "messages[1].tool_call_id");
        assert_eq!(alone(&["a"], &["a", "a"]), "messages[2].tool_call_id");
        assert_eq!(alone(&["a", "b"], &["a"]), "messages[0].tool_calls[1]");
        assert_eq!(alone(&[], &[""]), "messages[1].tool_call_id");
    }

    /// Twenty thousand of each take no longer than as many look-ups.
    #[test]
    fn as_many_as_are_taken_are_paired_in_any_order_and_more_are_refused() {
        let ids: Vec<String> = (0..MOST - 1).map(|number| format!("{number}")).collect();
        let mut ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        let backwards: Vec<&str> = ids.iter().rev().copied().collect();
        let names = answered(&ids, &backwards).unwrap();
        assert_eq!(names.last().unwrap(), "tool 0");
        let nameless = vec![""; MOST - 1];
        assert_eq!(answered(&nameless, &nameless).unwrap()[7], "tool 7");
        assert_eq!(
            answered(&[], &vec![""; MOST]).unwrap_err().unwrap(),
            format!("messages[{MOST}]")
        );
        ids.extend(["x", "y"]);
        assert_eq!(answered(&ids, &[]).unwrap_err().unwrap(), "messages[0]");
    }
}
