//! The form of an answer, from the contract to the grammar that the engine keeps it to.

use marathon_proto::{
    brain::{self as pb, form::Answer},
    status::Problem,
};
use serde_json::Value;

use crate::{
    constrain::{CallTool, Calls, Form, FormError},
    sched::request::Request,
    text::model::TextModel,
};

/// Where an answer's text is described.
const FIELD: &str = "spec.form";
/// Where the tools are that a form does not bring itself.
const CONVERSATION: &str = "spec.conversation.tools";

/// What the answer must look like: what is asked for, or what strict tools ask for.
pub(super) fn form(
    given: Option<pb::Form>,
    conversation: &[pb::Tool],
) -> Result<Option<Form>, Problem> {
    let Some(given) = given else {
        let calls = pb::ToolCalls::default();
        let strict = conversation.iter().any(|tool| tool.strict);
        return match strict {
            true => Ok(Some(Form::Calls(self::calls(calls, conversation)?))),
            false => Ok(None),
        };
    };
    let calls = match given.tool_calls {
        Some(calls) => Some(self::calls(calls, conversation)?),
        None => None,
    };
    let json = |text: &str| {
        serde_json::from_str::<Value>(text).map_err(|error| {
            let message = format!("the schema is not valid JSON: {error}");
            Problem::invalid(format!("{FIELD}.json_schema"), message)
        })
    };
    match (given.answer, calls) {
        (None, None) => Err(Problem::invalid(
            FIELD,
            "the form is empty: give an answer's, or tool_calls",
        )),
        (None, Some(calls)) => Ok(Some(Form::Calls(calls))),
        (Some(Answer::JsonSchema(schema)), None) => Ok(Some(Form::JsonSchema(json(&schema)?))),
        (Some(Answer::Regex(regex)), None) => Ok(Some(Form::Regex(regex))),
        (Some(Answer::Choice(choice)), None) => Ok(Some(Form::Choice(choice.texts))),
        (Some(Answer::Lark(lark)), None) => Ok(Some(Form::Lark(lark))),
        (Some(Answer::JsonSchema(schema)), Some(calls)) if !calls.required => {
            Ok(Some(Form::JsonOrCalls(json(&schema)?, calls)))
        }
        (Some(answer), Some(_)) => {
            let what = "only JSON can stand in place of calls that are not required";
            let at = format!("{FIELD}.{}", name(&answer));
            Err(Problem::invalid(
                at,
                format!("{what}: leave one of the two out"),
            ))
        }
    }
}

fn name(answer: &Answer) -> &'static str {
    match answer {
        Answer::JsonSchema(_) => "json_schema",
        Answer::Regex(_) => "regex",
        Answer::Choice(_) => "choice",
        Answer::Lark(_) => "lark",
    }
}

fn calls(given: pb::ToolCalls, conversation: &[pb::Tool]) -> Result<Calls, Problem> {
    let field = format!("{FIELD}.tool_calls");
    let own = format!("{field}.tools");
    let (tools, at) = match given.tools.is_empty() {
        true => (conversation, CONVERSATION),
        false => (&given.tools[..], own.as_str()),
    };
    if let Some(unknown) = given
        .names
        .iter()
        .find(|name| tools.iter().all(|tool| tool.name != **name))
    {
        let message = format!("there is no tool {unknown:.60?}");
        return Err(Problem::invalid(format!("{field}.names"), message));
    }
    let mut called = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        if !given.names.is_empty() && !given.names.contains(&tool.name) {
            continue;
        }
        let name = format!("{at}[{index}].name");
        crate::text::conversation::check_name(&format!("`{name}`"), &tool.name)
            .map_err(|error| Problem::invalid(name, error.to_string()))?;
        let path = format!("{at}[{index}].parameters_json");
        let parameters = match tool.parameters_json.is_empty() {
            true => None,
            false => Some(
                serde_json::from_str(&tool.parameters_json).map_err(|error| {
                    let message = format!("the parameters are not valid JSON: {error}");
                    Problem::invalid(&path, message)
                })?,
            ),
        };
        called.push(CallTool {
            name: tool.name.clone(),
            parameters,
            strict: tool.strict,
            path,
        });
    }
    Ok(Calls {
        tools: called,
        required: given.required,
        single: given.single,
    })
}

/// Gives a request its form: compiled, in step with its prompt.
pub(super) fn apply(text: &TextModel, form: &Form, request: &mut Request) -> Result<(), Problem> {
    let grammar = text.grammars().compile(form);
    let grammar = grammar.map_err(|error| refused(form, error))?;
    if grammar.ends(&request.params.stop_tokens).is_empty() {
        let message = "an answer of a form ends where the form is complete: leave ignore_eos out";
        return Err(Problem::invalid("spec.sampling.ignore_eos", message));
    }
    let matcher = grammar.matcher(&request.prompt, &request.params.stop_tokens);
    request.grammar = form.to_text();
    request.constraint = Some(Box::new(matcher));
    Ok(())
}

/// Gives a request whose grammar is known its constraint, as after a restart. Where the grammar
/// does not compile any more there is none, and the engine refuses the request.
pub(super) fn revive(text: &TextModel, request: &mut Request) {
    request.constraint = Form::from_text(&request.grammar)
        .and_then(|form| text.grammars().compile(&form).ok())
        .map(|grammar| {
            let matcher = grammar.matcher(&request.prompt, &request.params.stop_tokens);
            Box::new(matcher) as _
        });
}

fn refused(form: &Form, error: FormError) -> Problem {
    let answer = match form {
        Form::JsonSchema(_) | Form::JsonOrCalls(..) => "json_schema",
        Form::Regex(_) => "regex",
        Form::Choice(_) => "choice",
        Form::Lark(_) => "lark",
        Form::Calls(_) => "tool_calls",
    };
    let FormError { path, message } = error;
    let field = match path.as_str() {
        "" => format!("{FIELD}.{answer}"),
        path if path.starts_with("spec.") => path.to_owned(),
        path if path.starts_with('[') => format!("{FIELD}.{answer}{path}"),
        path => format!("{FIELD}.{answer}.{path}"),
    };
    Problem::invalid(field, message)
}
