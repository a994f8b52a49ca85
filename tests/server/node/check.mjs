// The official npm SDK against a running server: node check.mjs BASE_URL KEY
import assert from "node:assert/strict";
import OpenAI from "openai";
import { ResponsesWS } from "openai/resources/responses/ws";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const model = "mm/fake";

async function chat() {
  const messages = [{ role: "user", content: "hello 世界" }];
  const whole = await client.chat.completions.create({ model, messages });
  assert.equal(whole.choices[0].message.content, "you said: hello 世界");
  const options = { include_usage: true };
  const stream = await client.chat.completions.create({
    model, messages, stream: true, stream_options: options,
  });
  let text = "", usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, "you said: hello 世界");
  assert.equal(usage.completion_tokens, 4);
}

async function responses() {
  const stream = client.responses.stream({ model, input: "one two" });
  for await (const event of stream) assert.equal(typeof event.sequence_number, "number");
  const first = await stream.finalResponse();
  assert.equal(first.output_text, "you said: one two");
  const next = await client.responses.create({
    model, input: "three", previous_response_id: first.id,
  });
  assert.equal(next.output_text, "you said: three");
}

function socket() {
  const ws = new ResponsesWS(client);
  const timer = setTimeout(() => assert.fail("no answer on the socket"), 120_000);
  return new Promise((resolve, reject) => {
    let text = "";
    ws.on("error", reject);
    ws.on("response.output_text.delta", (event) => (text += event.delta));
    ws.on("response.completed", (event) => {
      clearTimeout(timer);
      assert.equal(text, "you said: by socket");
      assert.equal(event.stream_id, "n");
      ws.close();
      resolve();
    });
    ws.send({ type: "response.create", stream_id: "n", model, input: "by socket" });
  });
}

async function errors() {
  await assert.rejects(client.responses.create({ model: "none", input: "x" }), (error) => {
    assert.equal(error.status, 404);
    assert.equal(error.code, "model_not_found");
    return true;
  });
}

await chat();
await responses();
await socket();
await errors();
console.log("ok");
