use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::text::{schema::Room, testing::assert_linear};

/// The JSON of arguments, `<|"|>` standing for the quote token; `None` for junk.
fn parse_with(opener: char, body: &str, schema: Option<Value>) -> Option<String> {
    let schema = schema.map(|value| {
        let Value::Object(map) = value else {
            panic!("a schema is an object")
        };
        Arc::new(Schema::parse(&map, &mut Room::default()).unwrap())
    });
    let mut args = Args::new(opener, schema);
    let mut out = String::new();
    for (index, part) in body.split("<|\"|>").enumerate() {
        if index > 0 {
            args.push(Atom::Quote, &mut out);
        }
        part.chars()
            .for_each(|c| args.push(Atom::Char(c), &mut out));
    }
    args.finish(&mut out);
    (!args.is_junk()).then_some(out)
}

fn parse(body: &str) -> Option<String> {
    parse_with('{', body, None)
}

#[track_caller]
fn check(body: &str, expected: Value) {
    let parsed = parse(body).unwrap_or_else(|| panic!("{body} is junk"));
    assert_eq!(parsed, expected.to_string(), "{body}");
}

#[test]
fn well_formed_arguments() {
    check("}", json!({}));
    check("city:<|\"|>Paris<|\"|>}", json!({"city": "Paris"}));
    check(
        "a:<|\"|>x, y}: \"z\"\\<|\"|>,b:12,c:-1.5,d:true,e:null}",
        json!({"a": "x, y}: \"z\"\\", "b": 12, "c": -1.5, "d": true, "e": null}),
    );
    check(
        "o:{x:[1,<|\"|>two<|\"|>,{y:false}],z:{}},t:[]}",
        json!({"o": {"x": [1, "two", {"y": false}], "z": {}}, "t": []}),
    );
    check(
        "<|\"|>quoted key<|\"|>:<|\"|>v<|\"|>}",
        json!({"quoted key": "v"}),
    );
    check(
        "s:<|\"|><|\"|>,n: 5 , m:\n6}",
        json!({"s": "", "n": 5, "m": 6}),
    );
    check(
        "code:<|\"|>fn a() {\n  b[0]\n}\n<|\"|>}",
        json!({"code": "fn a() {\n  b[0]\n}\n"}),
    );
    check("u:<|\"|>é😊\u{2028}<|\"|>}", json!({"u": "é😊\u{2028}"}));
}

#[test]
fn malformed_forms_are_recovered() {
    // Opening delimiter left out.
    check("city:Paris<|\"|>}", json!({"city": "Paris"}));
    check(
        "city:Paris, France<|\"|>,days:2}",
        json!({"city": "Paris, France", "days": 2}),
    );
    check("code:if x { y }<|\"|>}", json!({"code": "if x { y }"}));
    check("code:a } b<|\"|>,n:1}", json!({"code": "a } b", "n": 1}));
    // Closing delimiter or brace left out.
    check("city:<|\"|>Paris}", json!({"city": "Paris"}));
    check("city:<|\"|>Paris", json!({"city": "Paris"}));
    check("o:{city:<|\"|>Paris}}", json!({"o": {"city": "Paris"}}));
    check("a:1,b:2", json!({"a": 1, "b": 2}));
    check("a:[1,2}", json!({"a": [1, 2]}));
    check(
        "a:[{b:1,c:<|\"|>x<|\"|>",
        json!({"a": [{"b": 1, "c": "x"}]}),
    );
    // JSON and Python.
    check(
        "\"city\":\"Paris, \\\"the\\\" city\",\"n\":1}",
        json!({"city": "Paris, \"the\" city", "n": 1}),
    );
    check(
        "'city':'Paris','ok':True,'x':None}",
        json!({"city": "Paris", "ok": true, "x": null}),
    );
    check(
        "\"a\":{\"b\":[\"c}\",\"d\"]}}",
        json!({"a": {"b": ["c}", "d"]}}),
    );
    check("tags:[\"a\", 'b']}", json!({"tags": ["a", "b"]}));
    check("{\"a\":1}}", json!({"a": 1}));
    check("text:'tis the season}", json!({"text": "tis the season"}));
    check("text:\"a\" and \"b\"}", json!({"text": "\"a\" and \"b\""}));
    // Equals signs, missing colons and commas, stray closers.
    check("key=value,n=3}", json!({"key": "value", "n": 3}));
    check("city<|\"|>Paris<|\"|>}", json!({"city": "Paris"}));
    check(
        "a:<|\"|>x<|\"|>b:<|\"|>y<|\"|>}",
        json!({"a": "x", "b": "y"}),
    );
    check("a:<|\"|>x<|\"|>],b:1}", json!({"a": "x", "b": 1}));
    check("a:<|\"|>x<|\"|>)]}", json!({"a": "x"}));
    check("a:1}} extra", json!({"a": 1}));
    // Bare text with commas; repeated keys: the first counts.
    check("city:Paris, France}", json!({"city": "Paris, France"}));
    check(
        "o:{city:Paris, France},b:1}",
        json!({"o": {"city": "Paris, France"}, "b": 1}),
    );
    check("a:1,a:{b:2},c:3}", json!({"a": 1, "c": 3}));
    check("a:,b:1}", json!({"a": "", "b": 1}));
    check(
        "when:10:30,x:f(a, b)}",
        json!({"when": "10:30", "x": "f(a, b)"}),
    );
}

#[test]
fn parentheses_instead_of_braces() {
    let call = |body| parse_with('(', body, None).unwrap();
    assert_eq!(call("path='a.txt', n=2)"), r#"{"path":"a.txt","n":2}"#);
    assert_eq!(call("{\"a\":1})"), r#"{"a":1}"#);
    assert_eq!(call("f=max(1, 2), g=3)"), r#"{"f":"max(1, 2)","g":3}"#);
    assert_eq!(call(")"), "{}");
}

#[test]
fn what_holds_no_pair_is_junk() {
    for body in ["@@@}", "Paris, France}", "=}", "<|\"|>x<|\"|>}"] {
        assert_eq!(parse(body), None, "{body}");
    }
    assert_eq!(parse("  }").as_deref(), Some("{}"));
    assert_eq!(parse("]}").as_deref(), Some("{}"));
}

#[test]
fn the_schema_types_values() {
    let schema = json!({"type": "object", "properties": {
        "s": {"type": "string"}, "n": {"type": "integer"}, "f": {"type": ["number", "null"]},
        "l": {"type": "array", "items": {"type": "string"}},
        "o": {"type": "object", "properties": {"deep": {"type": "boolean"}}}}});
    let parse = |body| parse_with('{', body, Some(schema.clone())).unwrap();
    assert_eq!(
        parse("s:123,n:<|\"|>5<|\"|>,f:null}"),
        r#"{"s":"123","n":5,"f":null}"#
    );
    assert_eq!(
        parse("l:[1,true,<|\"|>x<|\"|>]}"),
        r#"{"l":["1","true","x"]}"#
    );
    assert_eq!(
        parse("o:{deep:true},n:many}"),
        r#"{"o":{"deep":true},"n":"many"}"#
    );
    assert_eq!(parse("s:a, b: c,n:1}"), r#"{"s":"a, b: c","n":1}"#);
}

#[test]
fn values_are_written_only_when_they_cannot_change() {
    let steps = |body: &str| -> Vec<String> {
        let mut args = Args::new('{', None);
        body.chars()
            .map(|c| {
                let mut out = String::new();
                let atom = if c == '§' {
                    Atom::Quote
                } else {
                    Atom::Char(c)
                };
                args.push(atom, &mut out);
                out
            })
            .collect()
    };
    let text = steps("n:10,s:§a} b§}");
    let written: Vec<(usize, &str)> = text
        .iter()
        .enumerate()
        .filter(|(_, out)| !out.is_empty())
        .map(|(i, out)| (i, out.as_str()))
        .collect();
    assert_eq!(
        written,
        [
            (1, "{\"n\":"),
            (6, "10,\"s\":"),
            (7, "\""),
            (8, "a"),
            (11, "} b"),
            (12, "\"")
        ]
    );
}

#[test]
fn deep_containers_end() {
    let deep = format!("a:{}1", "[".repeat(5_000));
    let parsed = parse(&deep).unwrap();
    assert!(serde_json::from_str::<Value>(&parsed).is_ok());
}

#[test]
fn a_long_argument_takes_linear_time() {
    let shapes: [(&str, &str, &str); 6] = [
        ("t:<|\"|>", "}\n", "<|\"|>}"),
        ("t:", "x, ", "<|\"|>}"),
        ("t:", "(", "}"),
        ("t:", "\"a\" ", "}"),
        ("", "a:1,", "}"),
        ("l:[", "{", "}"),
    ];
    for (head, unit, tail) in shapes {
        assert_linear(&format!("{head}{unit}"), 10_000, |n| {
            parse(&format!("{head}{}{tail}", unit.repeat(n)));
        });
    }
}

fn keys_and_values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<i32>().prop_map(|n| Value::from(f64::from(n) / 8.0)),
        "\\PC{0,12}".prop_map(Value::from),
        "[{}\\[\\]():,='\"\n a]{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map("[a-z_]{1,6}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn written(value: &Value) -> String {
    match value {
        Value::String(text) => format!("<|\"|>{text}<|\"|>"),
        Value::Array(items) => {
            format!(
                "[{}]",
                items.iter().map(written).collect::<Vec<_>>().join(",")
            )
        }
        Value::Object(map) => {
            let pairs: Vec<String> = map
                .iter()
                .map(|(k, v)| format!("{k}:{}", written(v)))
                .collect();
            format!("{{{}}}", pairs.join(","))
        }
        other => other.to_string(),
    }
}

proptest! {
    #[test]
    fn what_the_template_writes_reads_back(
        map in proptest::collection::btree_map("[a-z_]{1,6}", keys_and_values(), 0..4)
    ) {
        let value = Value::Object(map.into_iter().collect());
        let body = written(&value);
        let parsed = parse(&body[1..]).unwrap();
        prop_assert_eq!(serde_json::from_str::<Value>(&parsed).unwrap(), value);
    }

    #[test]
    fn anything_gives_valid_json(
        atoms in proptest::collection::vec(
            prop_oneof![
                Just("<|\"|>".to_owned()),
                "[{}\\[\\](),:='\"\\\\ \n]",
                "[a-c]", "[0-9.]", Just("true".to_owned()),
            ],
            0..60,
        ),
        paren in any::<bool>(),
    ) {
        let body: String = atoms.concat();
        if let Some(json) = parse_with(if paren { '(' } else { '{' }, &body, None) {
            let value = serde_json::from_str::<Value>(&json);
            prop_assert!(matches!(value, Ok(Value::Object(_))), "{} -> {}", body, json);
        }
    }
}
