//! A conversation of the contract as the text layer takes it.

use marathon_proto::{brain as pb, status::Problem};

use crate::text::conversation::{self, Call, Conversation, Message, Role, Tool};

/// A conversation from the wire; `field` is its path in the request.
pub(crate) fn conversation(given: pb::Conversation, field: &str) -> Result<Conversation, Problem> {
    let invalid = |at: String, error: conversation::ConversationError| {
        Problem::invalid(format!("{field}.{at}"), error.to_string())
    };
    let mut messages = Vec::with_capacity(given.messages.len());
    for (index, message) in given.messages.into_iter().enumerate() {
        let at = format!("messages[{index}]");
        let Some(role) = Role::parse(&message.role) else {
            let error = conversation::ConversationError::Role {
                index,
                role: message.role,
            };
            return Err(invalid(format!("{at}.role"), error));
        };
        let mut calls = Vec::with_capacity(message.tool_calls.len());
        for (number, call) in message.tool_calls.into_iter().enumerate() {
            let what = format!("the arguments of tool call {number} of message {index}");
            let arguments =
                conversation::parse_object(&what, &call.arguments_json).map_err(|error| {
                    invalid(format!("{at}.tool_calls[{number}].arguments_json"), error)
                })?;
            calls.push(Call {
                id: call.id,
                name: call.name,
                arguments,
            });
        }
        messages.push(Message {
            role,
            content: message.content,
            reasoning: message.reasoning,
            calls,
            call_id: message.tool_call_id,
            name: message.name,
        });
    }
    let mut tools = Vec::with_capacity(given.tools.len());
    for (index, tool) in given.tools.into_iter().enumerate() {
        let what = format!("the parameters of tool {:?}", tool.name);
        let parameters = conversation::parse_object(&what, &tool.parameters_json)
            .map_err(|error| invalid(format!("tools[{index}].parameters_json"), error))?;
        tools.push(Tool {
            name: tool.name,
            description: tool.description,
            parameters: (!parameters.is_empty()).then_some(parameters),
        });
    }
    Ok(Conversation {
        messages,
        tools,
        thinking: given.enable_thinking,
    })
}
