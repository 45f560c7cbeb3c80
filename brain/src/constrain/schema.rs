//! What is checked of a JSON Schema before it is compiled, so that what is wrong has a path.
//!
//! The compiler recurses, counts up to what a schema says, and knows no paths; none of that may be
//! a client's to use.

use serde_json::{Map, Value};

use super::{FormError, below};

/// Bytes of a schema's text, at most.
const MAX_BYTES: usize = 256 << 10;
/// Schemas, lists and maps in one schema, at most.
const MAX_NODES: usize = 5000;
/// How deep they may lie in each other.
const MAX_DEPTH: usize = 64;
/// Items or properties that a schema may count to.
const MAX_COUNT: u64 = 4096;
/// Characters that a schema may count to.
const MAX_LENGTH: u64 = 65_536;

/// Keywords that no grammar here can hold an answer to.
const UNSUPPORTED: [&str; 20] = [
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$dynamicAnchor",
    "$recursiveRef",
    "$recursiveAnchor",
    "$vocabulary",
    "contentSchema",
];

/// Keywords whose values are schemas by name, lists of schemas, and a schema.
const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
const LISTED: [&str; 4] = ["anyOf", "oneOf", "allOf", "prefixItems"];
const SINGLE: [&str; 3] = ["items", "additionalProperties", "additionalItems"];

/// Checks a schema that an answer must fit, in every keyword if `exactly`; `path` is where the
/// request has it.
pub(super) fn check(schema: &Value, path: &str, exactly: bool) -> Result<(), FormError> {
    check_size(schema, path)?;
    walk(schema, path, &mut |object, path| {
        for (keyword, value) in object {
            let at = below(path, keyword);
            let asks_nothing = value == &Value::Bool(false) && keyword == "uniqueItems";
            if exactly && UNSUPPORTED.contains(&keyword.as_str()) && !asks_nothing {
                let message = format!("`{keyword}` cannot be enforced: leave it out");
                return Err(FormError::new(at, message));
            }
        }
        check_counts(object, path)?;
        check_range(object, path)
    })
}

/// What a schema without the keywords that ask for nothing compiles from.
pub(super) fn cleaned(schema: &Value) -> Value {
    let Value::Object(object) = schema else {
        return schema.clone();
    };
    let mut clean = object.clone();
    clean.remove("uniqueItems");
    for (keyword, value) in &mut clean {
        match value {
            Value::Object(named) if NAMED.contains(&keyword.as_str()) => {
                named.values_mut().for_each(|one| *one = cleaned(one));
            }
            Value::Array(list) if LISTED.contains(&keyword.as_str()) => {
                list.iter_mut().for_each(|one| *one = cleaned(one));
            }
            value if SINGLE.contains(&keyword.as_str()) => *value = cleaned(value),
            _ => {}
        }
    }
    Value::Object(clean)
}

/// Bounds of a schema that hold whatever it says.
fn check_size(schema: &Value, path: &str) -> Result<(), FormError> {
    let mut nodes = 0;
    measure(schema, 0, &mut nodes).map_err(|what| FormError::new(path, what))?;
    let bytes = schema.to_string().len();
    if bytes > MAX_BYTES {
        let message = format!("the schema has {bytes} bytes, at most {MAX_BYTES} are compiled");
        return Err(FormError::new(path, message));
    }
    Ok(())
}

fn measure(value: &Value, depth: usize, nodes: &mut usize) -> Result<(), String> {
    if depth > MAX_DEPTH {
        return Err(format!("the schema is more than {MAX_DEPTH} levels deep"));
    }
    let mut inside: Box<dyn Iterator<Item = &Value>> = match value {
        Value::Object(object) => Box::new(object.values()),
        Value::Array(list) => Box::new(list.iter()),
        _ => return Ok(()),
    };
    *nodes += 1;
    if *nodes > MAX_NODES {
        return Err(format!("the schema has more than {MAX_NODES} parts"));
    }
    inside.try_for_each(|value| measure(value, depth + 1, nodes))
}

/// Visits every schema in a schema, itself first, with its path.
fn walk(
    schema: &Value,
    path: &str,
    visit: &mut impl FnMut(&Map<String, Value>, &str) -> Result<(), FormError>,
) -> Result<(), FormError> {
    let object = match schema {
        Value::Bool(_) => return Ok(()),
        Value::Object(object) => object,
        _ => {
            let message = "a schema is an object, true or false";
            return Err(FormError::new(path, message));
        }
    };
    visit(object, path)?;
    for (path, schema) in inside(object, path)? {
        walk(schema, &path, visit)?;
    }
    Ok(())
}

/// The schemas directly in a schema.
pub(super) fn inside<'a>(
    object: &'a Map<String, Value>,
    path: &str,
) -> Result<Vec<(String, &'a Value)>, FormError> {
    let mut all = Vec::new();
    for (keyword, value) in object {
        let at = below(path, keyword);
        match (keyword.as_str(), value) {
            (keyword, Value::Object(named)) if NAMED.contains(&keyword) => {
                all.extend(named.iter().map(|(name, one)| (below(&at, name), one)));
            }
            (keyword, _) if NAMED.contains(&keyword) => {
                return Err(FormError::new(at, format!("`{keyword}` is an object")));
            }
            (keyword, Value::Array(list)) if LISTED.contains(&keyword) => {
                let indexed = list.iter().enumerate();
                all.extend(indexed.map(|(index, one)| (format!("{at}[{index}]"), one)));
            }
            (keyword, _) if LISTED.contains(&keyword) => {
                return Err(FormError::new(at, format!("`{keyword}` is a list")));
            }
            (keyword, value) if SINGLE.contains(&keyword) => all.push((at, value)),
            _ => {}
        }
    }
    Ok(all)
}

fn check_counts(object: &Map<String, Value>, path: &str) -> Result<(), FormError> {
    for (low, high, most) in [
        ("minItems", "maxItems", MAX_COUNT),
        ("minProperties", "maxProperties", MAX_COUNT),
        ("minLength", "maxLength", MAX_LENGTH),
    ] {
        let mut bounds = [0, u64::MAX];
        for (bound, keyword) in bounds.iter_mut().zip([low, high]) {
            let Some(value) = object.get(keyword) else {
                continue;
            };
            let at = below(path, keyword);
            let Some(count) = value.as_u64() else {
                let message = format!("`{keyword}` is a whole number, 0 or more");
                return Err(FormError::new(at, message));
            };
            if count > most {
                let message = format!("`{keyword}` is {count}, at most {most} are counted");
                return Err(FormError::new(at, message));
            }
            *bound = count;
        }
        if bounds[0] > bounds[1] {
            let message = format!("`{low}` is more than `{high}`: nothing fits");
            return Err(FormError::new(below(path, low), message));
        }
    }
    Ok(())
}

fn check_range(object: &Map<String, Value>, path: &str) -> Result<(), FormError> {
    let number = |keyword: &str| match object.get(keyword) {
        None => Ok(None),
        Some(value) => value.as_f64().map(Some).ok_or_else(|| {
            let message = format!("`{keyword}` is a number");
            FormError::new(below(path, keyword), message)
        }),
    };
    let low = [number("minimum")?, number("exclusiveMinimum")?];
    let high = [number("maximum")?, number("exclusiveMaximum")?];
    for (low, keyword) in low.into_iter().zip(["minimum", "exclusiveMinimum"]) {
        if low.is_some_and(|low| high.iter().flatten().any(|high| low > *high)) {
            let message = format!("`{keyword}` is above the maximum: nothing fits");
            return Err(FormError::new(below(path, keyword), message));
        }
    }
    let choices = object.get("enum").map(Value::as_array);
    if choices.is_some_and(|choices| choices.is_none_or(Vec::is_empty)) {
        let message = "`enum` is a list of at least one value";
        return Err(FormError::new(below(path, "enum"), message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_wrong_is_told_by_its_path() {
        let deep = (0..70).fold(json!({}), |inner, _| json!({"items": inner}));
        let wide = json!({"enum": vec![json!([]); 6000]});
        let cases = [
            (json!(3), ""),
            (
                json!({"properties": {"a": {"not": {}}}}),
                "properties.a.not",
            ),
            (
                json!({"anyOf": [{}, {"uniqueItems": true}]}),
                "anyOf[1].uniqueItems",
            ),
            (json!({"items": {"minItems": -1}}), "items.minItems"),
            (json!({"maxItems": 1_000_000_000}), "maxItems"),
            (json!({"minLength": 3, "maxLength": 2}), "minLength"),
            (json!({"minimum": 3, "exclusiveMaximum": 2}), "minimum"),
            (json!({"minimum": "3"}), "minimum"),
            (json!({"$defs": {"x": {"enum": []}}}), "$defs.x.enum"),
            (json!({"properties": []}), "properties"),
            (json!({"anyOf": {}}), "anyOf"),
            (deep, ""),
            (wide, ""),
        ];
        for (schema, path) in cases {
            let error = check(&schema, "", true).unwrap_err();
            assert_eq!(error.path, path, "{schema:.100}: {error}");
        }
        let error = check(&json!({"if": {}}), "here", true).unwrap_err();
        assert_eq!(error.path, "here.if");
    }

    #[test]
    fn names_are_no_keywords() {
        let schema = json!({
            "properties": {"not": {"type": "string"}, "if": true, "uniqueItems": {}},
            "uniqueItems": false, "const": {"not": 1}, "minLength": 1,
        });
        check(&schema, "", true).unwrap();
        check(&json!({"not": {}}), "", false).unwrap();
        let clean = cleaned(&schema);
        assert_eq!(clean.get("uniqueItems"), None);
        assert_eq!(clean["properties"], schema["properties"]);
    }
}
