//! Renders what `tests/goldens/templates.py` had transformers render.

use serde_json::Value;

use super::*;
use crate::text::{
    conversation::{Call, Message, Role},
    testing::TEMPLATE,
};

fn goldens() -> Value {
    serde_json::from_str(include_str!("../../../../tests/goldens/templates.json")).unwrap()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn message(value: &Value) -> Message {
    let calls = list(&value["tool_calls"]).iter().map(|call| Call {
        id: text(&call["id"]),
        name: text(&call["function"]["name"]),
        arguments: call["function"]["arguments"].as_object().unwrap().clone(),
    });
    Message {
        role: Role::parse(&text(&value["role"])).unwrap(),
        content: text(&value["content"]),
        reasoning: text(&value["reasoning"]),
        calls: calls.collect(),
        call_id: text(&value["tool_call_id"]),
        name: text(&value["name"]),
    }
}

fn conversation(case: &Value) -> Conversation {
    let tools = list(&case["tools"]).iter().map(|tool| Tool {
        name: text(&tool["function"]["name"]),
        description: text(&tool["function"]["description"]),
        parameters: tool["function"]["parameters"].as_object().cloned(),
    });
    Conversation {
        messages: list(&case["messages"]).iter().map(message).collect(),
        tools: tools.collect(),
        thinking: case["thinking"] == true,
    }
}

#[test]
fn conversations_render_as_transformers_renders_them() {
    let goldens = goldens();
    let cases = list(&goldens["conversations"]);
    assert!(cases.len() >= 100);
    let template = Template::new(TEMPLATE).unwrap();
    for case in cases {
        let rendered = template.render(&conversation(case), case["generation_prompt"] == true);
        assert_eq!(rendered.unwrap(), text(&case["text"]), "{case}");
    }
}

/// How ours renders a snippet, where that is not as the golden says.
fn difference(snippet: &Value) -> Option<String> {
    let inputs = json!({ "messages": [goldens()["seen"]], "tools": [] });
    let source = text(&snippet["template"]);
    let rendered = Template::new(&source).and_then(|t| t.render_value(&inputs, false, false));
    match (&rendered, snippet["text"].as_str()) {
        (Ok(ours), Some(theirs)) if ours == theirs => None,
        (Err(_), None) => None,
        _ => Some(format!("{source}\n  {rendered:?}\n  {}", snippet["text"])),
    }
}

/// The list of what is known to differ is no longer than it has to be.
#[test]
fn what_is_known_to_differ_differs() {
    let goldens = goldens();
    for snippet in list(&goldens["different"]) {
        assert!(difference(snippet).is_some(), "{snippet}");
    }
}

#[test]
fn pythons_and_jinjas_habits_render_as_transformers_renders_them() {
    let goldens = goldens();
    let snippets = list(&goldens["snippets"]);
    assert!(snippets.len() >= 70);
    let different: Vec<String> = snippets.iter().filter_map(difference).collect();
    assert!(different.is_empty(), "{}", different.join("\n"));
}
