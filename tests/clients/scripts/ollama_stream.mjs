// Ollama's client for JavaScript. Arguments: URL of the server, model. Prints JSON.
import { Ollama } from 'ollama';

const [host, model] = process.argv.slice(2);
const client = new Ollama({ host });
const messages = [{ role: 'user', content: 'Say hello.' }];
const options = { temperature: 0, num_predict: 8 };

const whole = await client.chat({ model, messages, options });
let streamed = '';
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  streamed += part.message.content;
}
const { embeddings } = await client.embed({ model, input: 'a' });
const { models } = await client.list();
const shown = await client.show({ model });
console.log(
  JSON.stringify({
    whole: whole.message.content,
    streamed,
    dimensions: embeddings[0].length,
    names: models.map((each) => each.name),
    capabilities: shown.capabilities,
  }),
);
