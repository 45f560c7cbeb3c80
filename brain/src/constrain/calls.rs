//! Tool calls in Gemma's own notation, as a grammar.
//!
//! ```text
//! call  := <|tool_call> "call:" NAME "{" [KEY ":" value {"," KEY ":" value}] "}" <tool_call|>
//! value := <|"|> text <|"|> | number | "true" | "false" | "null" | "{" pairs "}" | "[" values "]"
//! ```
//!
//! Properties come in the order in which the template writes them: by name, whatever the case of
//! its letters. What a tool declares is what a call may have.

use std::{collections::HashMap, fmt::Write as _};

use serde_json::{Map, Value};

use super::{
    CallTool, Calls, FormError, below, schema,
    terminals::{anywhere, literal, number, token},
};
use crate::text::markers::Markers;

/// Rules of one grammar, at most.
const MAX_RULES: usize = 20_000;

/// Keywords that say nothing about values.
const NOTES: [&str; 16] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "example",
    "examples",
    "id",
    "nullable",
    "readOnly",
    "title",
    "writeOnly",
];

/// The grammar of the calls, in llguidance's Lark. With `json`, the schema of an answer in their
/// place, there is no other text.
pub(super) fn grammar(
    calls: &Calls,
    json: Option<&Value>,
    markers: &Markers,
) -> Result<String, FormError> {
    if calls.tools.is_empty() {
        return Err(FormError::new("", "there is no tool that could be called"));
    }
    let mut rules = Rules::new(markers);
    let mut bodies = Vec::new();
    for tool in &calls.tools {
        let arguments = rules.arguments(tool)?;
        let head = literal(&format!("call:{}", tool.name));
        bodies.push(format!("{head} {arguments}"));
    }
    let (open, close) = (token(markers.call_open), token(markers.call_close));
    let call = rules.rule(&format!("{open} ({}) {close}", bodies.join(" | ")));
    let start = match (calls.required, calls.single, json) {
        (true, true, _) => call,
        (true, false, _) => format!("{call}+"),
        (false, true, None) => format!("TEXT? {call}?"),
        (false, false, None) => format!("TEXT? ({call} TEXT?)*"),
        (false, single, Some(schema)) => {
            let answer = rules.rule(&format!("%json {schema}"));
            format!("{answer} | {call}{}", if single { "" } else { "+" })
        }
    };
    Ok(format!(
        "start: {start}\n{}TEXT: /(?s:.)+/\nNAME: /[^\\s:,{{}}\\[\\]()=\"'<>|]+/\nINTEGER: \
         /-?(0|[1-9][0-9]*)/\nNUMBER: /-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?/\n",
        rules.text
    ))
}

/// The rules written so far.
struct Rules<'a> {
    text: String,
    count: usize,
    quote: String,
    /// Rules of schemas that others refer to, by tool and reference.
    known: HashMap<String, String>,
    any: Option<String>,
    tool: Option<(&'a CallTool, &'a Value)>,
}

impl<'a> Rules<'a> {
    fn new(markers: &Markers) -> Self {
        Self {
            text: String::new(),
            count: 0,
            quote: token(markers.quote),
            known: HashMap::new(),
            any: None,
            tool: None,
        }
    }

    /// A new rule; returns its name.
    fn rule(&mut self, body: &str) -> String {
        let name = self.name();
        self.define(&name, body);
        name
    }

    fn name(&mut self) -> String {
        self.count += 1;
        format!("r{}", self.count)
    }

    fn define(&mut self, name: &str, body: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "{name}: {body}");
    }

    fn strict(&self) -> bool {
        self.tool.is_some_and(|(tool, _)| tool.strict)
    }

    /// A keyword that this notation cannot keep: refused where every one must be kept.
    fn passed_over(&self, path: &str, keyword: &str) -> Result<(), FormError> {
        if !self.strict() {
            return Ok(());
        }
        let message = format!("`{keyword}` cannot be enforced in a strict tool: leave it out");
        Err(FormError::new(below(path, keyword), message))
    }

    fn arguments(&mut self, tool: &'a CallTool) -> Result<String, FormError> {
        let Some(parameters) = &tool.parameters else {
            return Ok(literal("{}"));
        };
        let path = tool.path.clone();
        schema::check(parameters, &path, tool.strict)?;
        self.tool = Some((tool, parameters));
        self.known.clear();
        let object = parameters.as_object();
        let properties = object.and_then(|object| object.get("properties"));
        let open = object.and_then(|object| object.get("additionalProperties"));
        match (object, properties) {
            (Some(object), Some(Value::Object(_))) => self.object(object, &path, 0),
            // Arguments that nothing is said about are none.
            (Some(object), _) if open.is_none() && !object.contains_key("$ref") => {
                Ok(literal("{}"))
            }
            _ => self.value(parameters, &path, 0),
        }
    }

    /// What matches a value of the schema.
    fn value(&mut self, schema: &Value, path: &str, depth: usize) -> Result<String, FormError> {
        if self.count > MAX_RULES || depth > 256 {
            let message = "the tools' schemas are too large once their references are followed";
            return Err(FormError::new(path, message));
        }
        let object = match schema {
            Value::Bool(true) => return Ok(self.any()),
            Value::Object(object) => object,
            _ => {
                let message = "no value fits this schema: give an object";
                return Err(FormError::new(path, message));
            }
        };
        let mut kinds = self.kinds(object, path, depth)?;
        if object.get("nullable") == Some(&Value::Bool(true)) {
            kinds.push(literal("null"));
        }
        match kinds.as_slice() {
            [one] => Ok(one.clone()),
            several => Ok(format!("({})", several.join(" | "))),
        }
    }

    /// The alternatives of a schema.
    fn kinds(
        &mut self,
        object: &Map<String, Value>,
        path: &str,
        depth: usize,
    ) -> Result<Vec<String>, FormError> {
        if let Some(reference) = object.get("$ref") {
            return Ok(vec![self.reference(reference, path, depth)?]);
        }
        if let Some(one) = object.get("const") {
            return Ok(vec![self.constant(one, &below(path, "const"))?]);
        }
        if let Some(Value::Array(choices)) = object.get("enum") {
            let at = below(path, "enum");
            return choices.iter().map(|one| self.constant(one, &at)).collect();
        }
        for keyword in ["anyOf", "oneOf"] {
            if let Some(Value::Array(options)) = object.get(keyword) {
                let mut kinds = Vec::new();
                for (index, option) in options.iter().enumerate() {
                    let at = format!("{}[{index}]", below(path, keyword));
                    kinds.push(self.value(option, &at, depth + 1)?);
                }
                return Ok(kinds);
            }
        }
        if let Some(Value::Array(parts)) = object.get("allOf") {
            if let [one] = &parts[..] {
                let at = format!("{}[0]", below(path, "allOf"));
                return Ok(vec![self.value(one, &at, depth + 1)?]);
            }
            self.passed_over(path, "allOf")?;
            return Ok(vec![self.any()]);
        }
        let names: Vec<&str> = match object.get("type") {
            Some(Value::String(name)) => vec![name.as_str()],
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            _ if object.contains_key("properties") => vec!["object"],
            _ if object.contains_key("items") => vec!["array"],
            _ => Vec::new(),
        };
        if names.is_empty() {
            let said = object.keys().find(|key| !NOTES.contains(&key.as_str()));
            if let Some(keyword) = said {
                self.passed_over(path, keyword)?;
            }
            return Ok(vec![self.any()]);
        }
        names
            .into_iter()
            .map(|name| self.of_type(&name.to_ascii_lowercase(), object, path, depth))
            .collect()
    }

    fn of_type(
        &mut self,
        name: &str,
        object: &Map<String, Value>,
        path: &str,
        depth: usize,
    ) -> Result<String, FormError> {
        match name {
            "string" => self.string(object, path),
            "integer" | "number" => Ok(number(name, object)),
            "boolean" => Ok(format!("({} | {})", literal("true"), literal("false"))),
            "null" => Ok(literal("null")),
            "array" => self.array(object, path, depth),
            "object" => self.object(object, path, depth),
            other => {
                let message = format!("there is no type {other:.60?}");
                Err(FormError::new(below(path, "type"), message))
            }
        }
    }

    /// A schema that is defined elsewhere: a rule of its own, as it may refer to itself.
    fn reference(
        &mut self,
        reference: &Value,
        path: &str,
        depth: usize,
    ) -> Result<String, FormError> {
        let name = reference.as_str().unwrap_or_default();
        if let Some(rule) = self.known.get(name) {
            return Ok(rule.clone());
        }
        let found = name.strip_prefix('#').and_then(|pointer| {
            let (_, root) = self.tool?;
            root.pointer(pointer)
        });
        let Some(found) = found else {
            let message = format!("{reference:.100} is not in the schema");
            return Err(FormError::new(below(path, "$ref"), message));
        };
        let rule = self.name();
        self.known.insert(name.to_owned(), rule.clone());
        let body = self.value(found, path, depth + 1)?;
        if body == rule {
            let message = format!("{reference:.100} refers to itself alone");
            return Err(FormError::new(below(path, "$ref"), message));
        }
        self.define(&rule, &body);
        Ok(rule)
    }

    /// One given value.
    fn constant(&mut self, value: &Value, path: &str) -> Result<String, FormError> {
        let quote = &self.quote;
        match value {
            Value::String(text) if text.is_empty() => Ok(format!("({quote} {quote})")),
            Value::String(text) => Ok(format!("({quote} {} {quote})", literal(text))),
            Value::Array(_) | Value::Object(_) => {
                self.passed_over(path, "enum")?;
                Ok(self.any())
            }
            plain => Ok(literal(&plain.to_string())),
        }
    }

    fn string(&mut self, object: &Map<String, Value>, path: &str) -> Result<String, FormError> {
        let quote = self.quote.clone();
        if object.contains_key("format") {
            self.passed_over(path, "format")?;
        }
        let count = |keyword: &str| object.get(keyword).and_then(Value::as_u64);
        let (least, most) = (count("minLength"), count("maxLength"));
        if let Some(pattern) = object.get("pattern").and_then(Value::as_str) {
            if least.is_some() || most.is_some() {
                self.passed_over(path, "pattern")?;
            }
            return match anywhere(pattern) {
                Ok(regex) => Ok(format!("({quote} /{regex}/ {quote})")),
                Err(why) if self.strict() => {
                    let message = format!("the pattern cannot be read: {why:.200}");
                    Err(FormError::new(below(path, "pattern"), message))
                }
                Err(_) => Ok(format!("({quote} TEXT? {quote})")),
            };
        }
        let body = match (least.unwrap_or(0), most) {
            (0, None) => "TEXT?".to_owned(),
            (_, Some(0)) => String::new(),
            (0, Some(most)) => format!("/(?s:.){{1,{most}}}/?"),
            (least, None) => format!("/(?s:.){{{least},}}/"),
            (least, Some(most)) => format!("/(?s:.){{{least},{most}}}/"),
        };
        Ok(format!("({quote} {body} {quote})"))
    }

    fn array(
        &mut self,
        object: &Map<String, Value>,
        path: &str,
        depth: usize,
    ) -> Result<String, FormError> {
        for keyword in ["prefixItems", "additionalItems"] {
            if object.contains_key(keyword) {
                self.passed_over(path, keyword)?;
            }
        }
        let item = match object.get("items") {
            Some(items) if !object.contains_key("prefixItems") => {
                self.value(items, &below(path, "items"), depth + 1)?
            }
            _ => self.any(),
        };
        let item = self.rule(&item);
        let count = |keyword: &str| object.get(keyword).and_then(Value::as_u64);
        let (least, most) = (count("minItems").unwrap_or(0), count("maxItems"));
        let more = |from: u64| match most {
            Some(0 | 1) => String::new(),
            Some(most) => format!("(\",\" {item}){{{from},{}}}", most - 1),
            None => format!("(\",\" {item}){{{from},}}"),
        };
        Ok(match (least, most) {
            (_, Some(0)) => literal("[]"),
            (0, None) => format!("(\"[\" [{item} (\",\" {item})*] \"]\")"),
            (0, Some(_)) => format!("(\"[\" [{item} {}] \"]\")", more(0)),
            (least, _) => format!("(\"[\" {item} {} \"]\")", more(least - 1)),
        })
    }

    /// A map: its declared properties in the template's order, then any others it may have.
    fn object(
        &mut self,
        object: &Map<String, Value>,
        path: &str,
        depth: usize,
    ) -> Result<String, FormError> {
        for keyword in ["patternProperties", "minProperties", "maxProperties"] {
            if object.contains_key(keyword) {
                self.passed_over(path, keyword)?;
            }
        }
        let none = Map::new();
        let declared = object.get("properties").and_then(Value::as_object);
        let declared = declared.unwrap_or(&none);
        let required: Vec<&str> = match object.get("required") {
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let unknown = required.iter().find(|name| !declared.contains_key(**name));
        let others = match object.get("additionalProperties") {
            Some(Value::Bool(false)) => None,
            None if !declared.is_empty() => None,
            None | Some(Value::Bool(true)) => Some(self.any()),
            Some(of) => Some(self.value(of, &below(path, "additionalProperties"), depth + 1)?),
        };
        if let Some(name) = unknown {
            if others.is_none() {
                let message = format!("{name:.60?} is required, but not among the properties");
                return Err(FormError::new(below(path, "required"), message));
            }
            self.passed_over(path, "required")?;
        }
        let mut names: Vec<&String> = declared.keys().collect();
        names.sort_by_cached_key(|name| (name.to_lowercase(), (*name).clone()));
        let mut pairs = Vec::new();
        for name in names {
            let at = below(&below(path, "properties"), name);
            if name.is_empty() || name.contains([':', ',', '{', '}', '[', ']', '<', '=', '"']) {
                if self.strict() {
                    let message = "a name with such characters cannot be told in a call";
                    return Err(FormError::new(at, message));
                }
                continue;
            }
            let value = self.value(&declared[name], &at, depth + 1)?;
            let pair = format!("{} {value}", literal(&format!("{name}:")));
            pairs.push((pair, required.contains(&name.as_str())));
        }
        Ok(self.pairs(&pairs, others))
    }

    /// Pairs in order, of which those that are not required may be left out. `head` rules begin a
    /// list, `tail` rules go on behind a pair.
    fn pairs(&mut self, pairs: &[(String, bool)], others: Option<String>) -> String {
        let (mut head, mut tail) = match others {
            None => (None, None),
            Some(value) => {
                let pair = self.rule(&format!("NAME \":\" {value}"));
                let tail = self.rule(&format!("(\",\" {pair})+"));
                let head = self.rule(&format!("{pair} (\",\" {pair})*"));
                (Some(head), Some(tail))
            }
        };
        // Whether a list may end before what `head` and `tail` say.
        let mut may_end = true;
        for (pair, required) in pairs.iter().rev() {
            let rest = match (&tail, may_end) {
                (None, _) => String::new(),
                (Some(tail), true) => format!("{tail}?"),
                (Some(tail), false) => tail.clone(),
            };
            let here = self.rule(&format!("{pair} {rest}"));
            let skipped = |rest: &Option<String>| match rest {
                Some(rest) if !required => format!(" | {rest}"),
                _ => String::new(),
            };
            let (begin, go_on) = (
                format!("{here}{}", skipped(&head)),
                format!("\",\" {here}{}", skipped(&tail)),
            );
            head = Some(self.rule(&begin));
            tail = Some(self.rule(&go_on));
            may_end &= !required;
        }
        match (head, may_end) {
            (None, _) => literal("{}"),
            (Some(head), true) => format!("(\"{{\" {head}? \"}}\")"),
            (Some(head), false) => format!("(\"{{\" {head} \"}}\")"),
        }
    }

    /// Any value at all.
    fn any(&mut self) -> String {
        if let Some(any) = &self.any {
            return any.clone();
        }
        let any = self.name();
        let pair = self.rule(&format!("NAME \":\" {any}"));
        let quote = self.quote.clone();
        let body = format!(
            "({quote} TEXT? {quote}) | NUMBER | \"true\" | \"false\" | \"null\" | \
             (\"[\" [{any} (\",\" {any})*] \"]\") | (\"{{\" [{pair} (\",\" {pair})*] \"}}\")"
        );
        self.define(&any, &body);
        self.any = Some(any.clone());
        any
    }
}

#[cfg(test)]
#[path = "calls_tests.rs"]
mod tests;
