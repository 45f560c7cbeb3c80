//! JSON Schemas of tool parameters, reduced to what Gemma's template and the argument parser read.
//!
//! The template knows one type per property. So `$ref` is resolved, "X or null" becomes X with
//! `nullable`, other unions show their first type, and keywords that it would print as if they
//! were properties are dropped. The argument parser keeps all types of a union.

use std::sync::Arc;

use indexmap::{IndexMap, IndexSet};
use serde_json::{Map, Value, json};

/// A schema that cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SchemaError {
    /// `$ref` leads nowhere.
    #[error(
        "the schema refers to {0:?}, which is not in it; only references like #/$defs/Name work"
    )]
    Reference(String),
    /// Too large once its references are followed.
    #[error(
        "the tools' schemas have more than {MAX_PARTS} parts or {} MiB of text \
         once their references are followed",
        MAX_TEXT >> 20
    )]
    TooLarge,
}

/// Types of JSON Schema; null is [`Schema::nullable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Text.
    String,
    /// A whole number.
    Integer,
    /// Any number.
    Number,
    /// true or false.
    Boolean,
    /// A map.
    Object,
    /// A list.
    Array,
}

impl Kind {
    fn parse(name: &str) -> Option<Self> {
        Some(match name.to_ascii_lowercase().as_str() {
            "string" => Self::String,
            "integer" => Self::Integer,
            "number" => Self::Number,
            "boolean" => Self::Boolean,
            "object" => Self::Object,
            "array" => Self::Array,
            _ => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Self::String => "string",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::Boolean => "boolean",
            Self::Object => "object",
            Self::Array => "array",
        }
    }
}

/// A schema with its references followed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Schema {
    /// Declared types without null, in order; empty when none was declared.
    pub kinds: Vec<Kind>,
    /// null is allowed.
    pub nullable: bool,
    /// Properties of an object, in order.
    pub properties: IndexMap<String, Arc<Schema>>,
    /// Schema of the items of an array.
    pub items: Option<Arc<Schema>>,
    description: Option<String>,
    choices: IndexSet<Value>,
    required: IndexSet<String>,
    /// Keywords that the template shows inside array items only.
    rest: Map<String, Value>,
}

/// Far above what a context can hold: every part is some tokens of the prompt.
const MAX_PARTS: usize = 100_000;
/// As much as the largest request, so that only references can bring more.
const MAX_TEXT: usize = 16 << 20;
const MAX_DEPTH: usize = 32;

/// What the schemas of one request may still hold together. Every keyword and every value that is
/// copied counts each time that it is copied: a reference costs as much as what it refers to.
#[derive(Debug)]
pub struct Room {
    parts: usize,
    text: usize,
}

impl Default for Room {
    fn default() -> Self {
        Self {
            parts: MAX_PARTS,
            text: MAX_TEXT,
        }
    }
}

impl Room {
    fn take(&mut self, parts: usize, text: usize) -> Result<(), SchemaError> {
        let left = |room: usize, wanted| room.checked_sub(wanted).ok_or(SchemaError::TooLarge);
        self.parts = left(self.parts, parts)?;
        self.text = left(self.text, text)?;
        Ok(())
    }

    /// Takes what a copy of a value takes.
    fn take_value(&mut self, value: &Value) -> Result<(), SchemaError> {
        match value {
            Value::String(text) => self.take(1, text.len()),
            Value::Array(list) => {
                self.take(1, 0)?;
                list.iter().try_for_each(|one| self.take_value(one))
            }
            Value::Object(map) => {
                self.take(1, 0)?;
                map.iter().try_for_each(|(key, one)| {
                    self.take(0, key.len())?;
                    self.take_value(one)
                })
            }
            _ => self.take(1, 0),
        }
    }
}

/// Keywords whose values are read or copied as they are.
const COPIED: &[&str] = &[
    "type",
    "nullable",
    "description",
    "enum",
    "const",
    "required",
    "$ref",
];

/// Keywords that hold further schemas, and those that have no place in the template.
const APART: &[&str] = &[
    "properties",
    "items",
    "prefixItems",
    "anyOf",
    "oneOf",
    "allOf",
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "title",
    "additionalProperties",
];

impl Schema {
    /// Reads the schema of a tool's parameters. `room` is what is left of the request's.
    pub fn parse(root: &Map<String, Value>, room: &mut Room) -> Result<Self, SchemaError> {
        let root = Value::Object(root.clone());
        let mut reader = Reader {
            root: &root,
            room,
            open: Vec::new(),
        };
        reader.read(&root)
    }

    /// The schema of a property.
    pub fn property(&self, name: &str) -> Option<&Arc<Schema>> {
        self.properties.get(name)
    }

    /// The schema as the template reads it.
    pub fn to_template(&self) -> Value {
        self.value(false)
    }

    fn value(&self, in_items: bool) -> Value {
        let mut out = Map::new();
        if let Some(description) = &self.description {
            out.insert("description".into(), json!(description));
        }
        if !self.choices.is_empty() {
            let choices = self.choices.iter().cloned();
            out.insert("enum".into(), choices.collect());
        }
        if in_items {
            out.extend(self.rest.clone());
        }
        if let Some(items) = &self.items {
            out.insert("items".into(), items.value(true));
        }
        if self.nullable {
            out.insert("nullable".into(), json!(true));
        }
        if !self.properties.is_empty() {
            let properties: Map<String, Value> = self
                .properties
                .iter()
                .map(|(name, schema)| (name.clone(), schema.value(false)))
                .collect();
            out.insert("properties".into(), Value::Object(properties));
        } else if self.kind() == Kind::Object {
            // Without it the template takes the other keywords for properties.
            out.insert("properties".into(), json!({}));
        }
        if !self.required.is_empty() {
            let required = self.required.iter().map(String::as_str);
            out.insert("required".into(), required.collect());
        }
        out.insert("type".into(), json!(self.kind().name()));
        Value::Object(out)
    }

    /// The one type that the template shows.
    fn kind(&self) -> Kind {
        match self.kinds.first() {
            Some(kind) => *kind,
            None if !self.properties.is_empty() => Kind::Object,
            None if self.items.is_some() => Kind::Array,
            None => Kind::String,
        }
    }

    /// Takes in what a further schema says; what is already said stays.
    fn absorb(&mut self, other: Schema) {
        for kind in other.kinds {
            self.add_kind(kind);
        }
        self.nullable |= other.nullable;
        for (name, schema) in other.properties {
            self.properties.entry(name).or_insert(schema);
        }
        self.items = self.items.take().or(other.items);
        self.description = self.description.take().or(other.description);
        self.choices.extend(other.choices);
        self.required.extend(other.required);
        for (key, value) in other.rest {
            self.rest.entry(key).or_insert(value);
        }
    }

    fn add_kind(&mut self, kind: Kind) {
        if !self.kinds.contains(&kind) {
            self.kinds.push(kind);
        }
    }
}

struct Reader<'a, 'r> {
    root: &'a Value,
    room: &'r mut Room,
    /// References being followed: one that is met again is a cycle.
    open: Vec<&'a str>,
}

impl<'a> Reader<'a, '_> {
    fn read(&mut self, value: &'a Value) -> Result<Schema, SchemaError> {
        self.room.take(1, 0)?;
        let mut schema = Schema::default();
        let Value::Object(map) = value else {
            return Ok(schema);
        };
        if self.nodes_deep() {
            schema.kinds.push(Kind::Object);
            return Ok(schema);
        }
        self.read_plain(map, &mut schema)?;
        if let Some(Value::String(path)) = map.get("$ref") {
            let target = self.follow(path)?;
            schema.absorb(target);
        }
        for part in list(map, "allOf") {
            let part = self.nested(part)?;
            schema.absorb(part);
        }
        for keyword in ["anyOf", "oneOf"] {
            for part in list(map, keyword) {
                let mut part = self.nested(part)?;
                // What only one of the alternatives demands is not demanded.
                part.required.clear();
                schema.absorb(part);
            }
        }
        Ok(schema)
    }

    fn read_plain(
        &mut self,
        map: &'a Map<String, Value>,
        schema: &mut Schema,
    ) -> Result<(), SchemaError> {
        for (key, value) in map {
            self.room.take(1, key.len())?;
            if !APART.contains(&key.as_str()) {
                self.room.take_value(value)?;
            }
        }
        let declared = match map.get("type") {
            Some(Value::Array(types)) => types.iter().collect(),
            Some(single) => vec![single],
            None => Vec::new(),
        };
        for name in declared.into_iter().filter_map(Value::as_str) {
            schema.nullable |= name.eq_ignore_ascii_case("null");
            if let Some(kind) = Kind::parse(name) {
                schema.add_kind(kind);
            }
        }
        schema.nullable |= map.get("nullable") == Some(&Value::Bool(true));
        schema.description = map
            .get("description")
            .and_then(Value::as_str)
            .map(str::to_owned);
        let choices = list(map, "enum").iter().chain(map.get("const"));
        for choice in choices {
            if choice.is_null() {
                schema.nullable = true;
            } else {
                schema.choices.insert(choice.clone());
            }
        }
        if let Some(Value::Object(properties)) = map.get("properties") {
            for (name, property) in properties {
                self.room.take(0, name.len())?;
                let property = self.nested(property)?;
                schema.properties.insert(name.clone(), Arc::new(property));
            }
        }
        schema.required = list(map, "required")
            .iter()
            .filter_map(|name| name.as_str().map(str::to_owned))
            .collect();
        let items = match map.get("items") {
            Some(Value::Array(tuple)) => tuple.first(),
            Some(items) => Some(items),
            None => list(map, "prefixItems").first(),
        };
        if let Some(items) = items {
            schema.items = Some(Arc::new(self.nested(items)?));
        }
        for (key, value) in map {
            let handled = |list: &[&str]| list.contains(&key.as_str());
            if !handled(COPIED) && !handled(APART) && !value.is_null() {
                schema.rest.insert(key.clone(), value.clone());
            }
        }
        Ok(())
    }

    fn nested(&mut self, value: &'a Value) -> Result<Schema, SchemaError> {
        // An empty name marks a level; it is no reference.
        self.open.push("");
        let schema = self.read(value);
        self.open.pop();
        schema
    }

    fn follow(&mut self, path: &'a str) -> Result<Schema, SchemaError> {
        let target = path
            .strip_prefix('#')
            .and_then(|pointer| self.root.pointer(pointer))
            .ok_or_else(|| SchemaError::Reference(path.to_owned()))?;
        if self.open.contains(&path) {
            return Ok(Schema {
                kinds: vec![Kind::Object],
                ..Schema::default()
            });
        }
        self.open.push(path);
        let schema = self.read(target);
        self.open.pop();
        schema
    }

    fn nodes_deep(&self) -> bool {
        self.open.len() > MAX_DEPTH
    }
}

fn list<'a>(map: &'a Map<String, Value>, key: &str) -> &'a [Value] {
    map.get(key)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::testing::assert_linear;

    fn parse(map: &Map<String, Value>) -> Result<Schema, SchemaError> {
        Schema::parse(map, &mut Room::default())
    }

    fn template(schema: Value) -> Value {
        let Value::Object(map) = schema else {
            panic!("a schema is an object")
        };
        parse(&map).unwrap().to_template()
    }

    #[test]
    fn unions_with_null_become_nullable() {
        let nullable = json!({"nullable": true, "type": "integer"});
        for schema in [
            json!({"type": ["integer", "null"]}),
            json!({"anyOf": [{"type": "integer"}, {"type": "null"}]}),
            json!({"oneOf": [{"type": "null"}, {"type": "integer"}], "title": "Days"}),
            json!({"type": "integer", "nullable": true, "default": 3}),
        ] {
            assert_eq!(template(schema), nullable);
        }
    }

    #[test]
    fn references_are_followed_and_cycles_end() {
        let schema = json!({
            "type": "object",
            "$defs": { "Node": { "type": "object", "properties": {
                "name": {"type": "string"}, "next": {"$ref": "#/$defs/Node"} } } },
            "properties": { "head": {"$ref": "#/$defs/Node", "description": "first"} }
        });
        assert_eq!(
            template(schema),
            json!({"properties": {"head": {"description": "first", "properties": {
                "name": {"type": "string"},
                "next": {"properties": {}, "type": "object"}}, "type": "object"}},
                "type": "object"})
        );
        let Value::Object(lost) = json!({"$ref": "#/$defs/Gone"}) else {
            panic!()
        };
        let error = parse(&lost).unwrap_err();
        assert_eq!(error, SchemaError::Reference("#/$defs/Gone".into()));
    }

    #[test]
    fn references_that_multiply_are_refused() {
        let mut defs = Map::new();
        for level in 0..20 {
            let next = json!({"$ref": format!("#/$defs/L{}", level + 1)});
            defs.insert(
                format!("L{level}"),
                json!({"type": "object", "properties": {"a": next, "b": next, "c": next}}),
            );
        }
        defs.insert("L20".into(), json!({"type": "string"}));
        let Value::Object(bomb) = json!({"$ref": "#/$defs/L0", "$defs": defs}) else {
            panic!()
        };
        assert_eq!(parse(&bomb), Err(SchemaError::TooLarge));
    }

    /// An object whose every property refers to one schema that holds `keyword`.
    fn repeated(keyword: &str, value: Value) -> Map<String, Value> {
        let properties: Map<String, Value> = (0..500)
            .map(|i| (i.to_string(), json!({"$ref": "#/$defs/S"})))
            .collect();
        let Value::Object(schema) =
            json!({"$defs": {"S": {(keyword): value}}, "properties": properties})
        else {
            panic!()
        };
        schema
    }

    #[test]
    fn every_copy_of_what_is_referred_to_counts() {
        let many: Vec<String> = (0..1000).map(|i| i.to_string()).collect();
        let types = vec!["string"; 1000];
        let nulls: Map<String, Value> = many.iter().map(|n| (n.clone(), Value::Null)).collect();
        for (keyword, value) in [
            ("enum", json!(many)),
            ("required", json!(many)),
            ("default", json!(many)),
            ("const", json!({"a": many})),
            ("type", json!(types)),
            ("description", json!("x".repeat(1 << 16))),
            ("properties", json!({("x".repeat(1 << 16)): {}})),
            ("allOf", json!([nulls])),
        ] {
            let schema = repeated(keyword, value);
            assert_eq!(parse(&schema), Err(SchemaError::TooLarge), "{keyword}");
        }
    }

    #[test]
    fn all_tools_of_a_request_share_the_room() {
        let many: Vec<String> = (0..1000).map(|i| i.to_string()).collect();
        let Value::Object(schema) = json!({"enum": many}) else {
            panic!()
        };
        let mut room = Room::default();
        let fit = (0..1000)
            .take_while(|_| Schema::parse(&schema, &mut room).is_ok())
            .count();
        assert!((50..100).contains(&fit), "{fit}");
    }

    #[test]
    fn what_alternatives_repeat_is_said_once() {
        let many: Vec<String> = (0..9).map(|i| i.to_string()).collect();
        let twice = json!({"anyOf": [{"enum": many, "type": ["string", "string"]},
            {"enum": many}], "allOf": [{"required": many}, {"required": many}]});
        let found = template(twice);
        assert_eq!(found["enum"], json!(many));
        assert_eq!(found["required"], json!(many));
        assert_eq!(found["type"], "string");
    }

    #[test]
    fn long_lists_are_taken_in_linearly() {
        let many = |n: usize| (0..n).map(|i| i.to_string()).collect::<Vec<_>>();
        type Form = (&'static str, fn(Vec<String>) -> Value);
        let forms: [Form; 3] = [
            ("choices", |many| json!({"anyOf": [{"enum": many}]})),
            ("required", |many| json!({"allOf": [{"required": many}]})),
            ("properties", |many| {
                let properties: Map<_, _> = many.into_iter().map(|n| (n, json!({}))).collect();
                json!({"anyOf": [{"properties": properties}]})
            }),
        ];
        for (name, form) in forms {
            assert_linear(name, 1500, |n| {
                let Value::Object(schema) = form(many(n)) else {
                    panic!()
                };
                parse(&schema).unwrap();
            });
        }
    }

    #[test]
    fn keywords_that_the_template_would_misread_are_dropped() {
        assert_eq!(
            template(json!({"type": "object", "additionalProperties": false, "$schema": "x"})),
            json!({"properties": {}, "type": "object"})
        );
        assert_eq!(
            template(
                json!({"type": "array", "items": {"type": "integer", "minimum": 1, "title": "T"}})
            ),
            json!({"items": {"minimum": 1, "type": "integer"}, "type": "array"})
        );
        assert_eq!(
            template(json!({"enum": ["a", null]})),
            json!({"enum": ["a"], "nullable": true, "type": "string"})
        );
        assert_eq!(
            template(json!(  {"description": "any"})),
            json!({"description": "any", "type": "string"})
        );
    }

    #[test]
    fn a_deep_schema_ends() {
        let mut schema = json!({"type": "string"});
        for _ in 0..100 {
            schema = json!({"type": "object", "properties": {"p": schema}});
        }
        template(schema);
    }
}
