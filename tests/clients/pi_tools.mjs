// Pi's extension: the tools that the demo model knows, instead of Pi's own, and its system prompt
// alone. Results are worded as the model learned them.
import { execFileSync } from 'node:child_process';
import { existsSync, lstatSync, readFileSync, readdirSync, statSync, writeFileSync } from 'node:fs';
import { resolve, sep } from 'node:path';

const declared = JSON.parse(
  readFileSync(new URL('../../brain/assets/demo/train/tools.json', import.meta.url)),
);

const ended = (text) => (text.endsWith('\n') ? text : `${text}\n`);
const unended = (text) => (text.endsWith('\n') ? text.slice(0, -1) : text);
const bytewise = (a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b));

class Refusal extends Error {}

function readText(path, shown) {
  if (!existsSync(path)) throw new Refusal(`${shown}: no such file`);
  if (statSync(path).isDirectory()) throw new Refusal(`${shown}: is a directory`);
  try {
    return new TextDecoder('utf-8', { fatal: true }).decode(readFileSync(path));
  } catch {
    throw new Refusal(`${shown}: not a text file`);
  }
}

const acts = {
  read: ({ path }, at) => unended(readText(at(path), path)),
  write({ path, content }, at) {
    writeFileSync(at(path), ended(content));
    return `wrote ${path}`;
  },
  append({ path, content }, at) {
    const before = existsSync(at(path)) ? readText(at(path), path) : '';
    writeFileSync(at(path), before + ended(content));
    return `appended to ${path}`;
  },
  edit({ path, old, new: replacement }, at) {
    const parts = readText(at(path), path).split(old);
    if (parts.length === 1) throw new Refusal(`${path}: text not found`);
    if (parts.length > 2) throw new Refusal(`${path}: text occurs ${parts.length - 1} times; make it unique`);
    writeFileSync(at(path), parts.join(replacement));
    return `edited ${path}`;
  },
  ls({ path }, at) {
    const shown = (name) => (lstatSync(resolve(at(path), name)).isDirectory() ? `${name}/` : name);
    return readdirSync(at(path)).map(shown).sort(bytewise).join('\n') || '(empty)';
  },
  bash: ({ command }, at) =>
    unended(execFileSync('sh', ['-c', command], { cwd: at('.'), encoding: 'utf8', timeout: 10_000 })),
  finish: () => 'finished',
};

export default function demoTools(pi) {
  pi.on('before_agent_start', () => ({ systemPrompt: process.env.DEMO_SYSTEM_PROMPT }));
  // The likeliest token never begins a remark. Gemma's template puts a remark behind the call that it
  // came before, and this small model loses its place then.
  pi.on('before_provider_request', ({ payload }) => ({ ...payload, temperature: 0 }));
  for (const { function: tool } of declared) {
    pi.registerTool({
      name: tool.name,
      label: tool.name,
      description: tool.description,
      parameters: tool.parameters,
      // The model learned to do one thing after the other.
      executionMode: 'sequential',
      async execute(_id, given, _signal, _update, context) {
        const at = (path) => {
          const whole = resolve(context.cwd, path);
          if (whole !== context.cwd && !whole.startsWith(context.cwd + sep)) {
            throw new Refusal(`${path}: outside of the workspace`);
          }
          return whole;
        };
        let text;
        try {
          text = acts[tool.name](given, at);
        } catch (error) {
          if (!(error instanceof Refusal)) throw error;
          text = `error: ${error.message}`;
        }
        return { content: [{ type: 'text', text }], details: {}, terminate: tool.name === 'finish' };
      },
    });
  }
}
