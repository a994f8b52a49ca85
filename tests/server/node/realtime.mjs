// The official npm SDK's Realtime socket, which always speaks TLS: node realtime.mjs BASE_URL KEY
import assert from "node:assert/strict";
import OpenAI from "openai";
import { OpenAIRealtimeWS } from "openai/realtime/ws";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const ws = new OpenAIRealtimeWS({ model: "mm/fake" }, client);
const timer = setTimeout(() => assert.fail("no answer on the socket"), 120_000);
const item = {
  type: "message", role: "user", content: [{ type: "input_text", text: "by npm" }],
};

await new Promise((resolve, reject) => {
  let text = "";
  ws.on("error", reject);
  ws.on("session.created", () => {
    ws.send({ type: "conversation.item.create", item });
    ws.send({ type: "response.create" });
  });
  ws.on("response.output_text.delta", (event) => (text += event.delta));
  ws.on("response.done", (event) => {
    assert.equal(text, "you said: by npm");
    assert.equal(event.response.status, "completed");
    resolve();
  });
});
clearTimeout(timer);
ws.close();
console.log("ok");
