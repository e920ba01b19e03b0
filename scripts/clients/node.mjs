// Call a server at the address given with the clients `openai` and `ai`, and print a line of JSON for each kind of call.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const [base, name] = process.argv.slice(2);
const given = { baseURL: `${base}/v1`, apiKey: "none" };
const ask = "What is the weather?";
const client = new OpenAI({ ...given, maxRetries: 0 });
const parameters = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "weather", parameters, strict: true } }];
const messages = [{ role: "user", content: ask }];
const short = { maxOutputTokens: 12, maxRetries: 0 };
const single = {
  openai: { parallelToolCalls: false },
  foredraft: { parallel_tool_calls: false },
  anthropic: { disableParallelToolUse: true },
};
const weather = tool({ inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }), execute: async ({ city }) => `Rain in ${city}` });

function check(holds, what) {
  if (!holds) throw new Error(`no ${what}`);
}

async function called() {
  const answer = await client.chat.completions.create({ model: name, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 120 });
  const call = answer.choices[0].message.tool_calls[0];
  check(["Paris", "Rome"].includes(JSON.parse(call.function.arguments).city), "city");
  const result = { role: "tool", tool_call_id: call.id, content: "Rain" };
  await client.chat.completions.create({ model: name, messages: [...messages, answer.choices[0].message, result], tools, max_tokens: 20 });
}

async function streamed() {
  const stream = client.chat.completions.stream({ model: name, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 120 });
  const final = await stream.finalChatCompletion();
  check(final.choices[0].message.tool_calls.length, "call");
}

async function responses() {
  const answer = await client.responses.create({ model: name, input: ask, max_output_tokens: 20, include: [], store: false });
  check(answer.output.length, "output");
  const stream = await client.responses.create({ model: name, input: ask, max_output_tokens: 20, stream: true });
  let last;
  for await (const event of stream) last = event;
  check(last.response.usage.output_tokens, "usage");
}

function kit(model) {
  return {
    text: async () => check((await generateText({ model, prompt: ask, ...short })).usage.outputTokens, "usage"),
    stream: async () => {
      const result = streamText({ model, prompt: ask, ...short });
      let parts = 0;
      for await (const part of result.fullStream) {
        if (part.type === "error") throw part.error;
        parts += 1;
      }
      check(parts > 2, "stream");
    },
    tools: async () => {
      const choice = { toolChoice: "required", stopWhen: stepCountIs(2), maxOutputTokens: 120, maxRetries: 0 };
      const given = { tools: { weather }, providerOptions: single };
      const result = await generateText({ model, prompt: ask, ...given, ...choice });
      check(result.steps[0].toolResults.length, "result of a tool");
    },
    object: async () => {
      const schema = z.object({ city: z.enum(["Paris", "Rome"]) });
      const result = await generateObject({ model, schema, prompt: ask, maxOutputTokens: 120, maxRetries: 0 });
      check(result.object.city, "object");
    },
  };
}

const compatible = createOpenAICompatible({ name: "foredraft", ...given, supportsStructuredOutputs: true });
const calls = {
  "openai (Node)": { called, streamed, responses },
  "ai, openai-compatible": kit(compatible(name)),
  "ai, openai responses": kit(createOpenAI(given).responses(name)),
  "ai, openai chat": kit(createOpenAI(given).chat(name)),
  "ai, anthropic": kit(createAnthropic(given)(name)),
};
for (const [which, kinds] of Object.entries(calls)) {
  for (const [kind, call] of Object.entries(kinds)) {
    let problem = "";
    try {
      await call();
    } catch (error) {
      problem = `${error.name}: ${error.message}`.slice(0, 300);
    }
    console.log(JSON.stringify([which, kind, problem]));
  }
}
