use serde_json::json;

use super::super::{
    Form,
    compile::tests::{fails, fits, grammars, refused},
};
use super::*;

fn tool(name: &str, parameters: Value) -> CallTool {
    CallTool {
        name: name.into(),
        parameters: Some(parameters),
        strict: false,
        path: format!("tools[{name}]"),
    }
}

fn calls(tools: Vec<CallTool>, required: bool, single: bool) -> Form {
    Form::Calls(Calls {
        tools,
        required,
        single,
    })
}

fn weather() -> Value {
    json!({
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "City name"},
            "Days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "opts": {"type": "object", "properties": {"wind": {"type": "boolean"}}, "required": ["wind"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        },
        "required": ["city"],
    })
}

fn wrap(arguments: &str) -> String {
    format!("<|tool_call>call:get_weather{arguments}<tool_call|>")
}

#[test]
fn calls_are_written_as_the_template_writes_them() {
    let form = calls(vec![tool("get_weather", weather())], true, false);
    for arguments in [
        "{city:<|\"|>Paris<|\"|>}",
        "{city:<|\"|><|\"|>}",
        "{city:<|\"|>a } , <turn> \"é\n<|\"|>,Days:14,opts:{wind:true},tags:[<|\"|>a<|\"|>,<|\"|>b<|\"|>],unit:<|\"|>C<|\"|>}",
        "{city:<|\"|>x<|\"|>,tags:[],unit:<|\"|>F<|\"|>}",
    ] {
        fits(&form, &wrap(arguments));
    }
    fits(
        &form,
        &[wrap("{city:<|\"|>a<|\"|>}"), wrap("{city:<|\"|>b<|\"|>}")].concat(),
    );
    for arguments in [
        "{}",
        "{Days:3}",
        "{city:Paris<|\"|>}",
        "{city:\"Paris\"}",
        "{city=<|\"|>Paris<|\"|>}",
        "{city:<|\"|>Paris}",
        "{city:<|\"|>x<|\"|>,Days:15}",
        "{city:<|\"|>x<|\"|>,unit:<|\"|>K<|\"|>}",
        "{city:<|\"|>x<|\"|>,opts:{}}",
        "{city:<|\"|>x<|\"|>,more:1}",
        "{city:<|\"|>x<|\"|>,tags:[<|\"|>a<|\"|>,<|\"|>b<|\"|>,<|\"|>c<|\"|>]}",
        "(city:<|\"|>x<|\"|>)",
    ] {
        fails(&form, &wrap(arguments));
    }
    fails(&form, "");
    fails(&form, "It is sunny.");
    fails(&form, "<|tool_call>call:other{}<tool_call|>");
}

#[test]
fn text_and_several_calls_are_as_asked_for() {
    let tools = || vec![tool("f", json!({})), tool("fg", json!({"type": "object"}))];
    let (one, two) = (
        "<|tool_call>call:f{}<tool_call|>",
        "<|tool_call>call:f{}<tool_call|><|tool_call>call:fg{}<tool_call|>",
    );
    let text = "Let me see. call:f{}";
    let form = calls(tools(), true, true);
    fits(&form, one);
    fails(&form, two);
    fails(&form, text);
    let form = calls(tools(), true, false);
    fits(&form, two);
    fails(&form, &[text, one].concat());
    let form = calls(tools(), false, true);
    fits(&form, text);
    fits(&form, &[text, one].concat());
    fails(&form, two);
    let form = calls(tools(), false, false);
    fits(&form, &[text, one, text, one].concat());
    fits(&form, "");
    fails(&form, "<|tool_call>call:f{a:1}<tool_call|>");
    fails(&form, "<|tool_call>call:f{}");
}

#[test]
fn every_kind_of_value_has_its_form() {
    let form = |schema: Value| {
        let parameters = json!({"type": "object", "properties": {"x": schema}, "required": ["x"]});
        calls(vec![tool("f", parameters)], true, true)
    };
    let answer = |value: &str| format!("<|tool_call>call:f{{x:{value}}}<tool_call|>");
    let quoted = |text: &str| format!("<|\"|>{text}<|\"|>");
    let cases = [
        (
            json!({"type": "number"}),
            vec!["1", "-0.5", "1e+20"],
            vec!["01", "+1", "true"],
        ),
        (
            json!({"type": ["integer", "null"]}),
            vec!["3", "null"],
            vec!["3.5", "\"3\""],
        ),
        (
            json!({"type": "integer", "nullable": true}),
            vec!["3", "null"],
            vec!["x"],
        ),
        (json!({"const": 3}), vec!["3"], vec!["4", "33"]),
        (
            json!({"enum": [1, true, null]}),
            vec!["1", "true", "null"],
            vec!["false"],
        ),
        (
            json!({"multipleOf": 5, "type": "integer"}),
            vec!["15", "0"],
            vec!["16"],
        ),
        (
            json!({"type": "array", "items": {"type": "integer"}, "minItems": 2}),
            vec!["[1,2]", "[1,2,3]"],
            vec!["[1]", "[]"],
        ),
        (
            json!({"type": "array", "minItems": 1, "maxItems": 1}),
            vec!["[1]"],
            vec!["[1,2]", "[]"],
        ),
        (
            json!({"type": "array", "maxItems": 0}),
            vec!["[]"],
            vec!["[1]"],
        ),
        (
            json!({"type": "object"}),
            vec!["{}", "{a:1,b-c:{d:[]}}"],
            vec!["{a}", "{a:1,}"],
        ),
        (
            json!({"type": "object", "additionalProperties": {"type": "boolean"}}),
            vec!["{a:true}"],
            vec!["{a:1}"],
        ),
        (
            json!({"type": "object", "additionalProperties": false}),
            vec!["{}"],
            vec!["{a:1}"],
        ),
        (
            json!({"anyOf": [{"type": "boolean"}, {"type": "integer"}]}),
            vec!["true", "7"],
            vec!["null"],
        ),
        (json!({}), vec!["1", "[null,{a:false}]"], vec!["x", ""]),
        (json!(true), vec!["1"], vec!["x"]),
    ];
    for (schema, good, bad) in cases {
        good.iter()
            .for_each(|value| fits(&form(schema.clone()), &answer(value)));
        bad.iter()
            .for_each(|value| fails(&form(schema.clone()), &answer(value)));
    }
    let texts = [
        (
            json!({"type": "string", "minLength": 2, "maxLength": 3}),
            vec!["ab", "aéb"],
            vec!["a", "abcd"],
        ),
        (
            json!({"type": "string", "maxLength": 1}),
            vec!["", "x"],
            vec!["xy"],
        ),
        (
            json!({"type": "string", "pattern": "^a*$"}),
            vec!["", "aa"],
            vec!["b"],
        ),
        (
            json!({"type": "string", "pattern": "^a+/b$"}),
            vec!["aa/b"],
            vec!["xa/b", "a/bb"],
        ),
        (
            json!({"type": "string", "pattern": "[0-9]"}),
            vec!["a1b", "1"],
            vec!["ab"],
        ),
        (json!({"enum": ["", "a\"\n"]}), vec!["", "a\"\n"], vec!["b"]),
    ];
    for (schema, good, bad) in texts {
        good.iter()
            .for_each(|text| fits(&form(schema.clone()), &answer(&quoted(text))));
        bad.iter()
            .for_each(|text| fails(&form(schema.clone()), &answer(&quoted(text))));
    }
}

#[test]
fn properties_stand_in_order_and_only_required_ones_must() {
    let parameters = json!({
        "type": "object",
        "properties": {"b": {"type": "integer"}, "A": {"type": "integer"}, "c": {"type": "integer"},
                       "D": {"type": "integer"}},
        "required": ["b", "D"],
    });
    let form = calls(vec![tool("f", parameters)], true, true);
    let answer = |pairs: &str| format!("<|tool_call>call:f{{{pairs}}}<tool_call|>");
    for pairs in ["A:1,b:2,c:3,D:4", "b:2,D:4", "A:1,b:2,D:4", "b:2,c:3,D:4"] {
        fits(&form, &answer(pairs));
    }
    for pairs in [
        "b:2",
        "D:4",
        "D:4,b:2",
        "b:2,A:1,D:4",
        "b:2,,D:4",
        "b:2,D:4,",
        ",b:2,D:4",
        "",
    ] {
        fails(&form, &answer(pairs));
    }
    let open = json!({"type": "object", "properties": {"a": {"type": "integer"}},
                      "additionalProperties": true});
    let form = calls(vec![tool("f", open)], true, true);
    for pairs in ["", "a:1", "a:1,x:true", "x:true,y:1"] {
        fits(&form, &answer(pairs));
    }
}

#[test]
fn schemas_that_refer_to_themselves_are_followed() {
    let parameters = json!({
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/tree"}},
        "required": ["tree"],
        "$defs": {"tree": {"type": "object", "properties": {
            "left": {"$ref": "#/$defs/tree"}, "n": {"type": "integer"}}, "required": ["n"]}},
    });
    let form = calls(vec![tool("f", parameters)], true, true);
    fits(
        &form,
        "<|tool_call>call:f{tree:{left:{left:{n:1},n:2},n:3}}<tool_call|>",
    );
    fails(&form, "<|tool_call>call:f{tree:{left:{},n:3}}<tool_call|>");
}

#[test]
fn a_strict_tool_is_kept_to_or_refused_by_path() {
    let strict = |schema: Value| {
        let parameters = json!({"type": "object", "properties": {"x": schema}});
        let tool = CallTool {
            strict: true,
            path: "tools[3].parameters".into(),
            ..tool("f", parameters)
        };
        calls(vec![tool], true, false)
    };
    let at = "tools[3].parameters.properties.x";
    for (schema, path) in [
        (json!({"type": "string", "format": "email"}), ".format"),
        (json!({"type": "array", "prefixItems": []}), ".prefixItems"),
        (
            json!({"type": "object", "minProperties": 1}),
            ".minProperties",
        ),
        (json!({"not": {}}), ".not"),
        (json!({"allOf": [{}, {}]}), ".allOf"),
        (json!({"type": "string", "pattern": "a(?=b)"}), ".pattern"),
        (json!({"type": "string", "pattern": "^a|b$"}), ".pattern"),
        (json!({"type": "strung"}), ".type"),
        (json!({"$ref": "#/no"}), ".$ref"),
        (json!({"$ref": "#/properties/x"}), ".$ref"),
        (json!(false), ""),
        (json!({"properties": {"a:b": {}}}), ".properties.a:b"),
        (
            json!({"properties": {}, "required": ["y"], "additionalProperties": false}),
            ".required",
        ),
        (json!({"minimum": 1}), ".minimum"),
    ] {
        let error = refused(&strict(schema.clone()));
        let expected = match path {
            ".$ref" if schema["$ref"] == "#/properties/x" => error.path.clone(),
            path => format!("{at}{path}"),
        };
        assert_eq!(error.path, expected, "{schema}: {error}");
    }
    // What a tool does not promise strictly is kept as far as this notation can.
    for schema in [
        json!({"type": "string", "format": "email"}),
        json!({"not": {}, "type": "string"}),
        json!({"type": "string", "pattern": "a(?=b)"}),
    ] {
        let parameters = json!({"type": "object", "properties": {"x": schema}});
        let form = calls(vec![tool("f", parameters)], true, true);
        fits(&form, "<|tool_call>call:f{x:<|\"|>y<|\"|>}<tool_call|>");
    }
    assert!(grammars().compile(&calls(Vec::new(), true, false)).is_err());
}

#[test]
fn json_or_calls_is_one_or_the_other() {
    let Form::Calls(calls) = calls(vec![tool("f", json!({}))], false, false) else {
        panic!("calls");
    };
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}},
                        "required": ["a"], "additionalProperties": false});
    let form = Form::JsonOrCalls(schema, calls.clone());
    let call = "<|tool_call>call:f{}<tool_call|>";
    fits(&form, "{\"a\": 1}");
    fits(&form, call);
    fits(&form, &[call, call].concat());
    for both in [
        "{\"a\": 1}<|tool_call>call:f{}<tool_call|>",
        "text",
        "",
        "{}",
    ] {
        fails(&form, both);
    }
    let error = refused(&Form::JsonOrCalls(json!({"items": {"not": {}}}), calls));
    assert_eq!(error.path, "items.not");
}
