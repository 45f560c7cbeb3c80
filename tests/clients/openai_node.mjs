// OpenAI's Node SDK against brain: node openai_node.mjs URL FOLDER_WITH_NODE_MODULES TASK FIRST_STEP
import assert from 'node:assert/strict';
import { createRequire } from 'node:module';

const [url, installed, givenTask, givenFirst] = process.argv.slice(2);
const task = JSON.parse(givenTask);
const first = JSON.parse(givenFirst);
const { OpenAI } = createRequire(`${installed}/`)('openai');
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 });

function checkCall({ name, arguments: given }) {
  assert.equal(name, 'write');
  const { path, content } = JSON.parse(given);
  assert.equal(path, first.report);
  assert.equal(content.trim(), first.heading);
}

const cases = {
  async models() {
    const list = await client.models.list();
    assert.equal(list.data[0].id, 'demo');
  },
  async toolCall() {
    const answer = await client.chat.completions.create(task);
    checkCall(answer.choices[0].message.tool_calls[0].function);
  },
  async toolCallStreamed() {
    const stream = client.chat.completions.stream({ ...task, stream_options: { include_usage: true } });
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].finish_reason, 'tool_calls');
    checkCall(final.choices[0].message.tool_calls[0].function);
    assert.ok(final.usage.completion_tokens > 0);
  },
  async responsesStreamed() {
    const kinds = [];
    const stream = await client.responses.create({
      model: 'demo', input: 'Hi', max_output_tokens: 8, stream: true,
    });
    for await (const event of stream) kinds.push(event.type);
    assert.equal(kinds[0], 'response.created');
    assert.ok(['response.completed', 'response.incomplete'].includes(kinds.at(-1)));
  },
  async errors() {
    await assert.rejects(
      client.chat.completions.create({ ...task, temperature: 9 }),
      (error) => error.status === 400 && error.code === 'invalid_value',
    );
    await assert.rejects(
      client.chat.completions.create({ ...task, model: 'gpt-9' }),
      (error) => error.status === 404 && error.code === 'model_not_found',
    );
  },
};

let failed = 0;
for (const [name, run] of Object.entries(cases)) {
  try {
    await run();
  } catch (error) {
    failed += 1;
    console.error(name, error);
  }
}
console.log(`${Object.keys(cases).length} cases, ${failed} failed`);
process.exitCode = failed ? 1 : 0;
